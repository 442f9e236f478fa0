"""Z-Image: a transformer that takes lists, a language model as its text encoder, and flow matching."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from model_worker.pixels.family import Conditions, Description, Family, Size
from model_worker.pixels.flows import set_shifted


class ZImage(Family):
    """Texts keep their own lengths. Latents are in float32, whatever the denoiser computes in."""

    flows = True

    @property
    def denoiser(self) -> Any:
        return self.pipe.transformer

    def is_guided(self, guidance: float, negative_prompt: str | None) -> bool:
        return guidance > 0

    def guided(self, contrast: Tensor, given: Tensor, guidance: float) -> Tensor:
        return given + guidance * (given - contrast)

    def describe(self, prompt: str, negative_prompt: str | None, guided: bool) -> Description:
        given, contrast = self.pipe.encode_prompt(
            prompt, self.device, do_classifier_free_guidance=guided, negative_prompt=negative_prompt
        )
        other = {"texts": contrast[0][None]} if guided else None
        return Description({"texts": given[0][None]}, other)

    def _noise(self, size: Size, generator: torch.Generator) -> Tensor:
        channels = self.denoiser.in_channels
        latents: Tensor = self.pipe.prepare_latents(
            1, channels, size.height, size.width, torch.float32, self.device, generator
        )
        return latents

    def _schedule(self, steps: int, latents: Tensor) -> Any:
        scheduler = copy.deepcopy(self.pipe.scheduler)
        length = (latents.shape[2] // 2) * (latents.shape[3] // 2)
        set_shifted(scheduler, torch.linspace(1.0, 1 / steps, steps).tolist(), length, self.device)
        return scheduler

    def predict(self, latents: Tensor, timesteps: Tensor, conditions: Conditions, size: Size) -> Tensor:
        images = list(latents.to(self.dtype).unsqueeze(2).unbind(0))
        found = self.denoiser(
            images, (1000 - timesteps) / 1000, list(conditions["texts"].unbind(0)), return_dict=False
        )[0]
        return -torch.stack([each.float() for each in found]).squeeze(2)

    def scaled(self, latents: Tensor) -> Tensor:
        config = self.pipe.vae.config
        scaled: Tensor = (latents - config.shift_factor) * config.scaling_factor
        return scaled.float()

    def unscaled(self, latents: Tensor, size: Size) -> Tensor:
        config = self.pipe.vae.config
        unscaled: Tensor = latents / config.scaling_factor + config.shift_factor
        return unscaled
