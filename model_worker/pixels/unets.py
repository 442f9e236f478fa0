"""Pipelines whose denoiser is a UNet: Stable Diffusion 1, 2 and XL."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from model_worker.pixels.family import Conditions, Description, Family, Size


class StableDiffusion(Family):
    """Stable Diffusion 1 and 2, and what is distilled from them (LCM)."""

    @property
    def denoiser(self) -> Any:
        return self.pipe.unet

    def is_guided(self, guidance: float, negative_prompt: str | None) -> bool:
        return guidance > 1 and self.denoiser.config.time_cond_proj_dim is None

    def _first(self, noise: Tensor, scheduler: Any) -> Tensor:
        # How strong the noise is depends on the timesteps of some schedules.
        first: Tensor = noise * scheduler.init_noise_sigma
        return first

    def _noise(self, size: Size, generator: torch.Generator) -> Tensor:
        from diffusers.utils.torch_utils import randn_tensor

        sides = [side // self.pipe.vae_scale_factor for side in (size.height, size.width)]
        shape = (1, self.denoiser.config.in_channels, *sides)
        noise: Tensor = randn_tensor(shape, generator, self.device, self.dtype)
        return noise

    def describe(self, prompt: str, negative_prompt: str | None, guided: bool) -> Description:
        given, contrast = self.pipe.encode_prompt(prompt, self.device, 1, guided, negative_prompt)
        other = {"encoder_hidden_states": contrast} if guided else None
        return Description({"encoder_hidden_states": given}, other)

    def conditions(self, description: Conditions, size: Size, guidance: float) -> Conditions:
        width = self.denoiser.config.time_cond_proj_dim
        if width is None:
            return description
        scale = torch.tensor([guidance - 1])
        embedded = self.pipe.get_guidance_scale_embedding(scale, embedding_dim=width)
        return {**description, "timestep_cond": embedded.to(self.device, self.dtype)}

    def predict(self, latents: Tensor, timesteps: Tensor, conditions: Conditions, size: Size) -> Tensor:
        noise: Tensor = self.denoiser(latents, timesteps, **conditions, return_dict=False)[0]
        return noise

    def _step_arguments(self, generator: torch.Generator) -> dict[str, Any]:
        further: dict[str, Any] = self.pipe.prepare_extra_step_kwargs(generator, 0.0)
        return further

    def scaled(self, latents: Tensor) -> Tensor:
        factor: float = self.pipe.vae.config.scaling_factor
        return factor * latents

    def unscaled(self, latents: Tensor, size: Size) -> Tensor:
        factor: float = self.pipe.vae.config.scaling_factor
        return latents / factor


class StableDiffusionXL(StableDiffusion):
    """Stable Diffusion XL: two text encoders, and a denoiser that is given the size."""

    def __init__(self, pipe: Any, device: torch.device) -> None:
        super().__init__(pipe, device)
        # Its first VAE has values that float16 cannot hold.
        if pipe.vae.dtype == torch.float16 and pipe.vae.config.force_upcast:
            pipe.vae.to(torch.float32)

    def describe(self, prompt: str, negative_prompt: str | None, guided: bool) -> Description:
        given, contrast, pooled, other = self.pipe.encode_prompt(
            prompt=prompt,
            device=self.device,
            do_classifier_free_guidance=guided,
            negative_prompt=negative_prompt,
        )
        second = {"encoder_hidden_states": contrast, "text_embeds": other} if guided else None
        return Description({"encoder_hidden_states": given, "text_embeds": pooled}, second)

    def conditions(self, description: Conditions, size: Size, guidance: float) -> Conditions:
        width = self.pipe.text_encoder_2.config.projection_dim
        full = (size.height, size.width)
        ids = self.pipe._get_add_time_ids(full, (0, 0), full, dtype=self.dtype, text_encoder_projection_dim=width)
        return {**super().conditions(description, size, guidance), "time_ids": ids.to(self.device)}

    def predict(self, latents: Tensor, timesteps: Tensor, conditions: Conditions, size: Size) -> Tensor:
        added = {name: conditions[name] for name in ("text_embeds", "time_ids")}
        others = {name: value for name, value in conditions.items() if name not in added}
        noise: Tensor = self.denoiser(latents, timesteps, **others, added_cond_kwargs=added, return_dict=False)[0]
        return noise

    def scaled(self, latents: Tensor) -> Tensor:
        factor: float = self.pipe.vae.config.scaling_factor
        moments = self._moments(latents)
        return super().scaled(latents) if moments is None else (latents - moments[0]) * factor / moments[1]

    def unscaled(self, latents: Tensor, size: Size) -> Tensor:
        factor: float = self.pipe.vae.config.scaling_factor
        moments = self._moments(latents)
        return super().unscaled(latents, size) if moments is None else latents * moments[1] / factor + moments[0]

    def _moments(self, latents: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return mean and deviation of the latents of each channel, where the VAE's config has them."""
        config = self.pipe.vae.config
        mean = getattr(config, "latents_mean", None)
        deviation = getattr(config, "latents_std", None)
        if mean is None or deviation is None:
            return None
        shape = (1, len(mean), 1, 1)
        return latents.new_tensor(mean).view(shape), latents.new_tensor(deviation).view(shape)
