"""Random pipelines of diffusers that take milliseconds a step, and what diffusers itself makes of a description."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from numpy.typing import NDArray
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from tests.model_worker.pixels.tiny_tokenizer import second_tokenizer, tokenizer_of
from tests.model_worker.pixels.tiny_transformers import flux_kontext, pixart, qwen_image, sana, z_image

# Parts of a pipeline that diffusers wants to be said to be absent.
_ABSENT: dict[str, dict[str, Any]] = {
    "StableDiffusionPipeline": {"safety_checker": None, "requires_safety_checker": False},
    "StableDiffusion3Pipeline": {"text_encoder_3": None, "tokenizer_3": None},
}


def tiny_pipeline(kind: str, folder: Path, seed: int = 0, scheduler: Any = None, **unet: Any) -> Path:
    """Save a pipeline of class `kind`, whose images are 32 pixels wide by default."""
    torch.manual_seed(seed)
    made = _MADE[kind](tokenizer_of(), scheduler, unet)
    for module in made.components.values():
        if isinstance(module, torch.nn.Module):
            module.eval()
    made.save_pretrained(folder)
    return folder


class Reference:
    """diffusers' own pipeline."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.pipe = getattr(diffusers, kind).from_pretrained(folder, dtype=torch.float32, **_ABSENT.get(kind, {}))
        self.pipe.set_progress_bar_config(disable=True)

    def image(self, prompt: str, seed: int, **options: Any) -> NDArray[np.float32]:
        """The pixels, f32[height, width, 3] between 0 and 1."""
        generator = torch.Generator("cpu").manual_seed(seed)
        image: NDArray[np.float32] = self.pipe(prompt=prompt, generator=generator, output_type="np", **options).images[
            0
        ]
        return image

    def of_task(self, task: str) -> Reference:
        """diffusers' pipeline for another task, such as Img2Img, with the same modules."""
        made = copy.copy(self)
        kind = type(self.pipe).__name__.removesuffix("Pipeline")
        made.pipe = getattr(diffusers, f"{kind}{task}Pipeline").from_pipe(self.pipe)
        made.pipe.set_progress_bar_config(disable=True)
        return made


def _vae(channels: int = 4, **more: Any) -> Any:
    return AutoencoderKL(
        block_out_channels=(8, 16),
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=channels,
        norm_num_groups=4,
        **more,
    )


def _text(tokenizer: Any, kind: type[Any], width: int = 16) -> Any:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=width,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return kind(config)


def _unet(**more: Any) -> Any:
    sizes: dict[str, Any] = {
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
    }
    return UNet2DConditionModel(**(sizes | more))


def _ddim() -> Any:
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def _stable_diffusion(tokenizer: Any, scheduler: Any, unet: dict[str, Any]) -> Any:
    return StableDiffusionPipeline(
        unet=_unet(**unet),
        scheduler=scheduler or _ddim(),
        vae=_vae(),
        text_encoder=_text(tokenizer, CLIPTextModel),
        tokenizer=tokenizer,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _stable_diffusion_xl(tokenizer: Any, scheduler: Any, unet: dict[str, Any]) -> Any:
    further = {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 16,
        "cross_attention_dim": 32,
    }
    return StableDiffusionXLPipeline(
        unet=_unet(**(further | unet)),
        scheduler=scheduler or _ddim(),
        vae=_vae(),
        text_encoder=_text(tokenizer, CLIPTextModel),
        text_encoder_2=_text(tokenizer, CLIPTextModelWithProjection),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        add_watermarker=False,
    )


def _stable_diffusion_3(tokenizer: Any, scheduler: Any, transformer: dict[str, Any]) -> Any:
    sizes: dict[str, Any] = {
        "sample_size": 16,
        "patch_size": 2,
        # diffusers' pipeline for masks takes no other number.
        "in_channels": 16,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 32,
        "out_channels": 16,
        "pos_embed_max_size": 32,
    }
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(**(sizes | transformer)),
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(16, shift_factor=0.06, scaling_factor=1.5, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=_text(tokenizer, CLIPTextModelWithProjection),
        text_encoder_2=_text(tokenizer, CLIPTextModelWithProjection),
        text_encoder_3=None,
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        tokenizer_3=None,
    )


def _flux(tokenizer: Any, scheduler: Any, transformer: dict[str, Any]) -> Any:
    sizes: dict[str, Any] = {
        "patch_size": 1,
        "in_channels": 32,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "pooled_projection_dim": 16,
        "axes_dims_rope": (4, 4, 8),
        "guidance_embeds": True,
    }
    encoder = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0, eos_token_id=1
    )
    return FluxPipeline(
        transformer=FluxTransformer2DModel(**(sizes | transformer)),
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(8, shift_factor=0.06, scaling_factor=1.5, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=_text(tokenizer, CLIPTextModel),
        text_encoder_2=T5EncoderModel(encoder),
        tokenizer=tokenizer,
        tokenizer_2=second_tokenizer(),
    )


_MADE = {
    "FluxKontextPipeline": lambda tokenizer, scheduler, more: flux_kontext(_flux(tokenizer, scheduler, more)),
    "FluxPipeline": _flux,
    "PixArtAlphaPipeline": lambda _, scheduler, more: pixart("PixArtAlphaPipeline", _vae, scheduler, more),
    "PixArtSigmaPipeline": lambda _, scheduler, more: pixart("PixArtSigmaPipeline", _vae, scheduler, more),
    "QwenImagePipeline": lambda _, scheduler, more: qwen_image(scheduler, more),
    "SanaPipeline": lambda _, scheduler, more: sana(scheduler, more),
    "ZImagePipeline": lambda _, scheduler, more: z_image(_vae, scheduler, more),
    "StableDiffusionPipeline": _stable_diffusion,
    "StableDiffusionXLPipeline": _stable_diffusion_xl,
    "StableDiffusion3Pipeline": _stable_diffusion_3,
}
