"""Qwen-Image: packed latents, a language model as its text encoder, and a VAE for videos."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model_worker.pixels.family import Conditions, Description, Family, Size
from model_worker.pixels.flows import set_shifted

# Tokens of a description that are read, as diffusers has it.
_MOST_TOKENS = 512


class QwenImage(Family):
    """Texts keep their own lengths. There is guidance only where a negative prompt is given."""

    flows = True
    forgets = False

    @property
    def denoiser(self) -> Any:
        return self.pipe.transformer

    def is_guided(self, guidance: float, negative_prompt: str | None) -> bool:
        return guidance > 1 and negative_prompt is not None

    def guided(self, contrast: Tensor, given: Tensor, guidance: float) -> Tensor:
        """The prediction has the length of that for the description."""
        both = contrast + guidance * (given - contrast)
        lengths: list[Tensor] = [torch.norm(each, dim=-1, keepdim=True) for each in (given, both)]
        return both * (lengths[0] / lengths[1])

    def describe(self, prompt: str, negative_prompt: str | None, guided: bool) -> Description:
        return Description(self._text(prompt), self._text(negative_prompt or "") if guided else None)

    def _text(self, text: str) -> Conditions:
        """Encode one text. A single one has no padding, and so no mask."""
        encoded, _ = self.pipe.encode_prompt(text, self.device, max_sequence_length=_MOST_TOKENS)
        return {"encoder_hidden_states": encoded}

    def conditions(self, description: Conditions, size: Size, guidance: float) -> Conditions:
        if not self.denoiser.config.guidance_embeds:
            return description
        return {**description, "guidance": torch.full([1], guidance, device=self.device, dtype=torch.float32)}

    def _noise(self, size: Size, generator: torch.Generator) -> Tensor:
        channels = self.denoiser.config.in_channels // 4
        latents: Tensor = self.pipe.prepare_latents(
            1, channels, size.height, size.width, self.dtype, self.device, generator
        )
        return latents

    def _schedule(self, steps: int, latents: Tensor) -> Any:
        scheduler = copy.deepcopy(self.pipe.scheduler)
        set_shifted(scheduler, np.linspace(1.0, 1 / steps, steps), latents.shape[1], self.device)
        return scheduler

    def predict(self, latents: Tensor, timesteps: Tensor, conditions: Conditions, size: Size) -> Tensor:
        sides = [side // self.pipe.vae_scale_factor // 2 for side in (size.height, size.width)]
        noise: Tensor = self.denoiser(
            hidden_states=latents,
            timestep=timesteps.to(latents.dtype) / 1000,
            img_shapes=[[(1, *sides)]] * len(latents),
            **conditions,
            return_dict=False,
        )[0]
        return noise

    def scaled(self, latents: Tensor) -> Tensor:
        mean, deviation = self._moments(latents)
        return (latents - mean) * (1.0 / deviation)

    def unscaled(self, latents: Tensor, size: Size) -> Tensor:
        unpacked = self.pipe._unpack_latents(latents, size.height, size.width, self.pipe.vae_scale_factor)
        mean, deviation = self._moments(latents)
        unscaled: Tensor = unpacked / (1.0 / deviation) + mean
        return unscaled

    def _moments(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of the latents of each channel."""
        config = self.pipe.vae.config
        shape = (1, config.z_dim, 1, 1, 1)
        return latents.new_tensor(config.latents_mean).view(shape), latents.new_tensor(config.latents_std).view(shape)

    def _encoded(self, pixels: Tensor, size: Size, generator: torch.Generator) -> Tensor:
        return super()._encoded(pixels.unsqueeze(2), size, generator)

    def _packed(self, latents: Tensor) -> Tensor:
        """Pack latents [1, channels, 1, height, width]."""
        flat = latents.squeeze(2)
        packed: Tensor = self.pipe._pack_latents(flat, *flat.shape)
        return packed

    def _latent_mask(self, mask: Tensor, latents: Tensor) -> Tensor:
        wide = super()._latent_mask(mask, latents).repeat(1, self.denoiser.config.in_channels // 4, 1, 1)
        return self._packed(wide.unsqueeze(2))

    def _decoded(self, latents: Tensor) -> Tensor:
        return super()._decoded(latents)[:, :, 0]
