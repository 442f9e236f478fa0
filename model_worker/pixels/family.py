"""The seam to diffusers' pipelines: what a family of them does at the beginning, in a step, and at the end of an image.

Each family calls diffusers' own encoders, denoiser and VAE, as its pipeline's `__call__` does, but for images that are
at different steps. Knows tensors; knows neither requests nor batches of a scheduler.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model_worker.pixels.tiles import tiled

# What a denoiser gets about a description, by the names of its arguments. The first dimension has length 1.
Conditions = dict[str, Tensor]


@dataclass(frozen=True)
class Description:
    """What a denoiser gets about a description, and about what it is contrasted with; None without guidance."""

    given: Conditions
    contrast: Conditions | None


@dataclass(frozen=True)
class Size:
    height: int
    width: int


@dataclass(frozen=True)
class Original:
    """An image to begin with: pixels [1, 3, height, width] between -1 and 1, in float32.

    `strength` is the part of the steps that are taken. `mask`, [1, 1, height, width], is 1 where the image is painted
    anew, and 0 where it stays.
    """

    pixels: Tensor
    strength: float
    mask: Tensor | None = None


@dataclass(frozen=True)
class Kept:
    """The latents of an image part of which stays, the noise that they get, and the part that does not, as 1."""

    latents: Tensor
    noise: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Beginning:
    """The latents that an image begins with, [1, ...], a scheduler of its own, and the timesteps that are left.

    `conditions` are further ones for all of its entries in a batch.
    """

    latents: Tensor
    scheduler: Any
    timesteps: Tensor
    kept: Kept | None = None
    conditions: Conditions = field(default_factory=dict)


class Family(ABC):
    """One loaded pipeline. `flows`: its denoiser predicts the difference of noise and image (flow matching)."""

    flows = False
    # Whether an image of which a part stays begins with noise alone when all steps are taken.
    forgets = True

    def __init__(self, pipe: Any, device: torch.device) -> None:
        self.pipe = pipe
        self.device = device

    @property
    @abstractmethod
    def denoiser(self) -> Any:
        """The module that takes the steps."""

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.denoiser.dtype
        return dtype

    def is_guided(self, guidance: float, negative_prompt: str | None) -> bool:
        """Whether the denoiser also has to see the contrast."""
        return guidance > 1

    def guided(self, contrast: Tensor, given: Tensor, guidance: float) -> Tensor:
        """Return what the denoiser predicts for an image, of its predictions for the contrast and the description."""
        return contrast + guidance * (given - contrast)

    @abstractmethod
    def describe(self, prompt: str, negative_prompt: str | None, guided: bool) -> Description:
        """Run the text encoders."""

    def conditions(self, description: Conditions, size: Size, guidance: float) -> Conditions:
        """Return the conditions of one image: those of its description, and what follows from its size."""
        return description

    def begin(self, size: Size, steps: int, generator: torch.Generator, original: Original | None = None) -> Beginning:
        """Begin an image. ValueError when too few steps are left of it."""
        if original is not None:
            return self._begin_with(original, size, steps, generator)
        noise = self._noise(size, generator)
        scheduler = self._schedule(steps, noise)
        return Beginning(self._first(noise, scheduler), scheduler, scheduler.timesteps)

    def _begin_with(self, original: Original, size: Size, steps: int, generator: torch.Generator) -> Beginning:
        """Begin an image with another one, as diffusers' pipelines for it do: noise is drawn in the same order."""
        latents = self._packed(self._encoded(original.pixels, size, generator))
        noise = self._noise(size, generator)
        scheduler = self._schedule(steps, noise)
        timesteps = self._left(scheduler, steps, original.strength)
        if original.mask is None:
            return Beginning(self._noised(scheduler, latents, noise, timesteps[0]), scheduler, timesteps)
        if self.forgets and original.strength == 1:
            first = self._first(noise, scheduler)
        else:
            first = self._noised(scheduler, latents, noise, timesteps[0])
        # diffusers also encodes the image without the masked part here, which only other denoisers read.
        self._noise(size, generator)
        return Beginning(first, scheduler, timesteps, Kept(latents, noise, self._latent_mask(original.mask, latents)))

    def restored(self, scheduler: Any, latents: Tensor, kept: Kept, timestep: Tensor | None) -> Tensor:
        """Return latents in which the kept part is that of the original, with the noise of a timestep, or without."""
        original = kept.latents if timestep is None else self._noised(scheduler, kept.latents, kept.noise, timestep)
        return (1 - kept.mask) * original + kept.mask * latents

    def _left(self, scheduler: Any, steps: int, strength: float) -> Tensor:
        """Return the timesteps that are left of an image which begins with another one."""
        skipped = self._skipped(steps, strength) * scheduler.order
        if skipped >= len(scheduler.timesteps):
            raise ValueError(
                f"strength {strength:g} of {steps} steps leaves none: send a larger strength, or more steps"
            )
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(skipped)
        left: Tensor = scheduler.timesteps[skipped:]
        return left

    def _skipped(self, steps: int, strength: float) -> int:
        """Return the number of steps that are not taken, rounded as diffusers does."""
        return int(max(steps - min(steps * strength, steps), 0)) if self.flows else steps - int(steps * strength)

    def _vae(self, size: Size) -> Any:
        """Return the VAE, whose memory is bounded for an image of this size."""
        return tiled(self.pipe.vae, size.height, size.width)

    def _encoded(self, pixels: Tensor, size: Size, generator: torch.Generator) -> Tensor:
        """Return the scaled latents of an image."""
        vae = self._vae(size)
        found = vae.encode(pixels.to(self.device, vae.dtype)).latent_dist.sample(generator)
        return self.scaled(found.to(self.dtype))

    def _packed(self, latents: Tensor) -> Tensor:
        """Return latents [1, channels, height, width] as the denoiser takes them."""
        return latents

    def _latent_mask(self, mask: Tensor, latents: Tensor) -> Tensor:
        """Return a mask of pixels as one of latents."""
        factor = self.pipe.vae_scale_factor
        sides = [side // factor for side in mask.shape[2:]]
        return torch.nn.functional.interpolate(mask, size=sides).to(latents.device, latents.dtype)

    def _first(self, noise: Tensor, scheduler: Any) -> Tensor:
        """Return the latents of an image that begins with nothing but noise."""
        return noise

    def _noised(self, scheduler: Any, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """Return latents with the noise that they have at a timestep."""
        at = timestep.reshape(1)
        if self.flows:
            mixed: Tensor = scheduler.scale_noise(latents, at, noise)
        else:
            mixed = scheduler.add_noise(latents, noise, at)
        return mixed.to(latents.dtype)

    def _noise(self, size: Size, generator: torch.Generator) -> Tensor:
        channels = self.denoiser.config.in_channels
        latents: Tensor = self.pipe.prepare_latents(
            1, channels, size.height, size.width, self.dtype, self.device, generator
        )
        return latents

    def _schedule(self, steps: int, latents: Tensor) -> Any:
        """Return a scheduler whose `timesteps` are set."""
        scheduler = copy.deepcopy(self.pipe.scheduler)
        scheduler.set_timesteps(steps, device=self.device, **self._shift(latents))
        return scheduler

    def _shift(self, latents: Tensor) -> dict[str, Any]:
        """Return the further arguments of `set_timesteps`."""
        return {}

    @abstractmethod
    def predict(self, latents: Tensor, timesteps: Tensor, conditions: Conditions, size: Size) -> Tensor:
        """Run the denoiser on latents [N, ...] of images of one size, each at its own of the timesteps [N]."""

    def step(
        self, scheduler: Any, noise: Tensor, timestep: Tensor, latents: Tensor, generator: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the step of one image. Returns its latents, and those that it is expected to end with."""
        taken = scheduler.step(noise, timestep, latents, **self._step_arguments(generator))
        after: Tensor = taken.prev_sample.to(latents.dtype)
        expected: Tensor | None = getattr(taken, "pred_original_sample", None)
        if expected is None and self.flows:
            expected = latents - timestep / scheduler.config.num_train_timesteps * noise
        return after, after if expected is None else expected.to(latents.dtype)

    def _step_arguments(self, generator: torch.Generator) -> dict[str, Any]:
        return {}

    @abstractmethod
    def scaled(self, latents: Tensor) -> Tensor:
        """Return latents of the VAE, [1, channels, height, width], in the denoiser's scale."""

    @abstractmethod
    def unscaled(self, latents: Tensor, size: Size) -> Tensor:
        """Return latents as the VAE takes them."""

    def pixels(self, latents: Tensor, size: Size) -> Tensor:
        """Decode the latents of one image to pixels [height, width, 3] between 0 and 1, in float32."""
        vae = self._vae(size)
        decoded = self._decoded(self.unscaled(latents.to(vae.dtype), size))
        found = self.pipe.image_processor.postprocess(decoded, output_type="pt", do_denormalize=[True])
        image: Tensor = found[0].float().permute(1, 2, 0).contiguous()
        return image

    def _decoded(self, latents: Tensor) -> Tensor:
        """Run the VAE's decoder. Returns [1, 3, height, width]."""
        decoded: Tensor = self.pipe.vae.decode(latents, return_dict=False)[0]
        return decoded


def joined(conditions: Sequence[Conditions]) -> Conditions:
    """Join the conditions of several entries of a batch. Their shapes are the same."""
    return {name: torch.cat([each[name] for each in conditions]) for name in conditions[0]}
