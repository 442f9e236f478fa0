"""Pipelines of transformers that are trained by flow matching: Stable Diffusion 3 and Flux."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model_worker.pixels.family import Beginning, Conditions, Description, Family, Original, Size

# The name of the latents of a reference among conditions.
_REFERENCE = "reference"


class StableDiffusion3(Family):
    """Stable Diffusion 3 and 3.5: a transformer over patches, and flow matching."""

    flows = True

    @property
    def denoiser(self) -> Any:
        return self.pipe.transformer

    def describe(self, prompt: str, negative_prompt: str | None, guided: bool) -> Description:
        given, contrast, pooled, other = self.pipe.encode_prompt(
            prompt=prompt,
            prompt_2=None,
            prompt_3=None,
            negative_prompt=negative_prompt,
            do_classifier_free_guidance=guided,
            device=self.device,
        )
        second = {"encoder_hidden_states": contrast, "pooled_projections": other} if guided else None
        return Description({"encoder_hidden_states": given, "pooled_projections": pooled}, second)

    def _shift(self, latents: Tensor) -> dict[str, Any]:
        config = self.pipe.scheduler.config
        if not config.get("use_dynamic_shifting"):
            return {}
        from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

        patch = self.denoiser.config.patch_size
        length = (latents.shape[2] // patch) * (latents.shape[3] // patch)
        named = {
            "base_seq_len": config.get("base_image_seq_len", 256),
            "max_seq_len": config.get("max_image_seq_len", 4096),
            "base_shift": config.get("base_shift", 0.5),
            "max_shift": config.get("max_shift", 1.16),
        }
        return {"mu": calculate_shift(length, **named)}

    def predict(self, latents: Tensor, timesteps: Tensor, conditions: Conditions, size: Size) -> Tensor:
        noise: Tensor = self.denoiser(hidden_states=latents, timestep=timesteps, **conditions, return_dict=False)[0]
        return noise

    def scaled(self, latents: Tensor) -> Tensor:
        factor: float = self.pipe.vae.config.scaling_factor
        shift: float = self.pipe.vae.config.shift_factor
        return (latents - shift) * factor

    def unscaled(self, latents: Tensor, size: Size) -> Tensor:
        factor: float = self.pipe.vae.config.scaling_factor
        shift: float = self.pipe.vae.config.shift_factor
        return latents / factor + shift


class Flux(Family):
    """Flux 1: a transformer over latents that are packed two by two, whose guidance is an input."""

    flows = True
    forgets = False

    @property
    def denoiser(self) -> Any:
        return self.pipe.transformer

    def is_guided(self, guidance: float, negative_prompt: str | None) -> bool:
        return False

    def describe(self, prompt: str, negative_prompt: str | None, guided: bool) -> Description:
        given, pooled, _ = self.pipe.encode_prompt(prompt=prompt, prompt_2=None, device=self.device)
        return Description({"encoder_hidden_states": given, "pooled_projections": pooled}, None)

    def conditions(self, description: Conditions, size: Size, guidance: float) -> Conditions:
        if not self.denoiser.config.guidance_embeds:
            return description
        return {**description, "guidance": torch.full([1], guidance, device=self.device, dtype=torch.float32)}

    def _noise(self, size: Size, generator: torch.Generator) -> Tensor:
        channels = self.denoiser.config.in_channels // 4
        latents: Tensor = self.pipe.prepare_latents(
            1, channels, size.height, size.width, self.dtype, self.device, generator
        )[0]
        return latents

    def _schedule(self, steps: int, latents: Tensor) -> Any:
        scheduler = copy.deepcopy(self.pipe.scheduler)
        if scheduler.config.get("use_flow_sigmas"):
            scheduler.set_timesteps(steps, device=self.device, mu=shift(scheduler, latents.shape[1]))
            scheduler.set_begin_index(0)
        else:
            set_shifted(scheduler, np.linspace(1.0, 1 / steps, steps), latents.shape[1], self.device)
        return scheduler

    def predict(self, latents: Tensor, timesteps: Tensor, conditions: Conditions, size: Size) -> Tensor:
        return self._predicted(latents, timesteps, conditions, self._places(size, latents.dtype))

    def _places(self, size: Size, dtype: torch.dtype) -> Tensor:
        """Return the places of the packed latents of an image, [latents, 3]."""
        sides = [side // (2 * self.pipe.vae_scale_factor) for side in (size.height, size.width)]
        places: Tensor = self.pipe._prepare_latent_image_ids(1, *sides, self.device, dtype)
        return places

    def _predicted(self, latents: Tensor, timesteps: Tensor, conditions: Conditions, places: Tensor) -> Tensor:
        texts = conditions["encoder_hidden_states"]
        noise: Tensor = self.denoiser(
            hidden_states=latents,
            timestep=timesteps.to(latents.dtype) / 1000,
            txt_ids=texts.new_zeros(texts.shape[1], 3),
            img_ids=places,
            **conditions,
            return_dict=False,
        )[0]
        return noise

    def scaled(self, latents: Tensor) -> Tensor:
        factor: float = self.pipe.vae.config.scaling_factor
        shift: float = self.pipe.vae.config.shift_factor
        return (latents - shift) * factor

    def _packed(self, latents: Tensor) -> Tensor:
        packed: Tensor = self.pipe._pack_latents(latents, *latents.shape)
        return packed

    def _latent_mask(self, mask: Tensor, latents: Tensor) -> Tensor:
        wide = super()._latent_mask(mask, latents)
        return self._packed(wide.repeat(1, self.denoiser.config.in_channels // 4, 1, 1))

    def unscaled(self, latents: Tensor, size: Size) -> Tensor:
        factor: float = self.pipe.vae.config.scaling_factor
        shift: float = self.pipe.vae.config.shift_factor
        unpacked: Tensor = self.pipe._unpack_latents(latents, size.height, size.width, self.pipe.vae_scale_factor)
        return unpacked / factor + shift


class FluxKontext(Flux):
    """Flux 1 Kontext: an image that the client sends is a reference, whose latents stand behind those of the image."""

    def begin(self, size: Size, steps: int, generator: torch.Generator, original: Original | None = None) -> Beginning:
        begun = super().begin(size, steps, generator)
        if original is None:
            return begun
        vae = self._vae(size)
        encoded = vae.encode(original.pixels.to(self.device, vae.dtype)).latent_dist.mode()
        return replace(begun, conditions={_REFERENCE: self._packed(self.scaled(encoded.to(self.dtype)))})

    def _noise(self, size: Size, generator: torch.Generator) -> Tensor:
        channels = self.denoiser.config.in_channels // 4
        latents: Tensor = self.pipe.prepare_latents(
            None, 1, channels, size.height, size.width, self.dtype, self.device, generator
        )[0]
        return latents

    def predict(self, latents: Tensor, timesteps: Tensor, conditions: Conditions, size: Size) -> Tensor:
        reference = conditions.get(_REFERENCE)
        if reference is None:
            return super().predict(latents, timesteps, conditions, size)
        own = self._places(size, latents.dtype)
        others = own.clone()
        others[..., 0] = 1
        rest = {name: value for name, value in conditions.items() if name != _REFERENCE}
        whole = torch.cat([latents, reference], dim=1)
        return self._predicted(whole, timesteps, rest, torch.cat([own, others]))[:, : latents.shape[1]]


def shift(scheduler: Any, length: int) -> float:
    """Return the shift of a schedule for an image of so many packed latents."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    config = scheduler.config
    mu: float = calculate_shift(
        length,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )
    return mu


def set_shifted(scheduler: Any, sigmas: Any, length: int, device: torch.device) -> None:
    """Set the timesteps of a schedule by its sigmas, shifted for an image of so many packed latents."""
    scheduler.set_timesteps(sigmas=sigmas, device=device, mu=shift(scheduler, length))
    scheduler.set_begin_index(0)
