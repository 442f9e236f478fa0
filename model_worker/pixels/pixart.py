"""PixArt and Sana: transformers whose texts stand beside the image, with a mask for their padding."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from model_worker.pixels.family import Conditions, Description, Family, Size

# Side of the latents of the one PixArt Alpha that is given the size.
_SIDE_WITH_SIZE = 128


class MaskedTexts(Family):
    """Pipelines whose `encode_prompt` gives texts of one length, and their masks."""

    @property
    def denoiser(self) -> Any:
        return self.pipe.transformer

    @property
    @abstractmethod
    def _encoding(self) -> dict[str, Any]:
        """The further arguments of `encode_prompt`."""

    def describe(self, prompt: str, negative_prompt: str | None, guided: bool) -> Description:
        given, mask, contrast, other = self.pipe.encode_prompt(
            prompt, guided, negative_prompt=negative_prompt or "", device=self.device, **self._encoding
        )
        second = {"encoder_hidden_states": contrast, "encoder_attention_mask": other} if guided else None
        return Description({"encoder_hidden_states": given, "encoder_attention_mask": mask}, second)

    def _step_arguments(self, generator: torch.Generator) -> dict[str, Any]:
        further: dict[str, Any] = self.pipe.prepare_extra_step_kwargs(generator, 0.0)
        return further

    def _without_variance(self, noise: Tensor) -> Tensor:
        """Return the prediction without the learnt variance, which is in its second half of some denoisers."""
        config = self.denoiser.config
        return noise.chunk(2, dim=1)[0] if config.out_channels // 2 == config.in_channels else noise

    def scaled(self, latents: Tensor) -> Tensor:
        factor: float = self.pipe.vae.config.scaling_factor
        return latents * factor

    def unscaled(self, latents: Tensor, size: Size) -> Tensor:
        factor: float = self.pipe.vae.config.scaling_factor
        return latents / factor


class PixArt(MaskedTexts):
    """PixArt Alpha and Sigma. Sizes are taken as they are, and not moved to the nearest that the model learnt."""

    @property
    def _encoding(self) -> dict[str, Any]:
        default = inspect.signature(self.pipe.__call__).parameters["max_sequence_length"].default
        return {"max_sequence_length": default}

    def conditions(self, description: Conditions, size: Size, guidance: float) -> Conditions:
        sigma = type(self.pipe).__name__ == "PixArtSigmaPipeline"
        if sigma or self.denoiser.config.sample_size != _SIDE_WITH_SIZE:
            return description
        made: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        resolution = torch.tensor([[size.height, size.width]], **made)
        return {
            **description,
            "resolution": resolution,
            "aspect_ratio": torch.tensor([[size.height / size.width]], **made),
        }

    def predict(self, latents: Tensor, timesteps: Tensor, conditions: Conditions, size: Size) -> Tensor:
        added = {name: conditions.get(name) for name in ("resolution", "aspect_ratio")}
        others = {name: value for name, value in conditions.items() if name not in added}
        noise = self.denoiser(latents, timestep=timesteps, **others, added_cond_kwargs=added, return_dict=False)[0]
        return self._without_variance(noise)


class Sana(MaskedTexts):
    """Sana: flow matching on latents of a deep VAE, in float32. Descriptions are read behind diffusers' instruction."""

    flows = True

    @property
    def _encoding(self) -> dict[str, Any]:
        parameters = inspect.signature(self.pipe.__call__).parameters
        return {name: parameters[name].default for name in ("max_sequence_length", "complex_human_instruction")}

    def _noise(self, size: Size, generator: torch.Generator) -> Tensor:
        channels = self.denoiser.config.in_channels
        latents: Tensor = self.pipe.prepare_latents(
            1, channels, size.height, size.width, torch.float32, self.device, generator
        )
        return latents

    def predict(self, latents: Tensor, timesteps: Tensor, conditions: Conditions, size: Size) -> Tensor:
        texts = conditions["encoder_hidden_states"].to(self.dtype)
        noise = self.denoiser(
            latents.to(self.dtype),
            timestep=timesteps * self.denoiser.config.timestep_scale,
            encoder_hidden_states=texts,
            encoder_attention_mask=conditions["encoder_attention_mask"],
            return_dict=False,
        )[0]
        return self._without_variance(noise.float())
