"""Tiny random pipelines whose text encoders are language models, or T5 alone."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKLQwenImage,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    Gemma2Config,
    Gemma2Model,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
)

from tests.model_worker.pixels.tiny_tokenizer import second_tokenizer

# A template as a language model's tokenizer has it.
_TEMPLATE = (
    "{% for message in messages %}u{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
_FLOW_VAE = {"shift_factor": 0.06, "scaling_factor": 1.5, "use_quant_conv": False, "use_post_quant_conv": False}
_WORDS: dict[str, Any] = {"vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16}


def _t5() -> Any:
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0, eos_token_id=1
    )
    return T5EncoderModel(config)


def flux_kontext(flux: Any) -> Any:
    """The modules of a Flux pipeline."""
    names = ("transformer", "scheduler", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    return FluxKontextPipeline(**{name: getattr(flux, name) for name in names})


def z_image(vae: Any, scheduler: Any, transformer: dict[str, Any]) -> Any:
    tokenizer = second_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    sizes: dict[str, Any] = {
        "all_patch_size": (2,),
        "all_f_patch_size": (1,),
        "in_channels": 8,
        "dim": 32,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 16,
        "axes_dims": [4, 6, 6],
        "axes_lens": [64, 64, 64],
    }
    made = ZImageTransformer2DModel(**(sizes | transformer))
    with torch.no_grad():
        for parameter in (made.x_pad_token, made.cap_pad_token):
            parameter.normal_(std=0.02)
    encoder = Qwen3Config(**_WORDS, intermediate_size=32, num_hidden_layers=2, head_dim=8)
    return ZImagePipeline(
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(8, **_FLOW_VAE),
        text_encoder=Qwen3Model(encoder),
        tokenizer=tokenizer,
        transformer=made,
    )


def qwen_image(scheduler: Any, transformer: dict[str, Any]) -> Any:
    sizes: dict[str, Any] = {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "axes_dims_rope": (4, 6, 6),
    }
    text = {**_WORDS, "intermediate_size": 32, "num_hidden_layers": 2}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 16}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return QwenImagePipeline(
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2],
            num_res_blocks=1,
            temperal_downsample=[False],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.5, 2.0, 1.0, 0.5],
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=second_tokenizer(),
        transformer=QwenImageTransformer2DModel(**(sizes | transformer)),
    )


def pixart(kind: str, vae: Any, scheduler: Any, transformer: dict[str, Any]) -> Any:
    sizes: dict[str, Any] = {
        "sample_size": 16,
        "num_layers": 2,
        "patch_size": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "caption_channels": 16,
        "in_channels": 4,
        "cross_attention_dim": 16,
        "out_channels": 8,
        "attention_bias": True,
        "norm_elementwise_affine": False,
        "use_additional_conditions": False,
    }
    made = {"PixArtAlphaPipeline": PixArtAlphaPipeline, "PixArtSigmaPipeline": PixArtSigmaPipeline}[kind]
    return made(
        tokenizer=second_tokenizer(),
        text_encoder=_t5(),
        vae=vae(),
        transformer=PixArtTransformer2DModel(**(sizes | transformer)),
        scheduler=scheduler or DPMSolverMultistepScheduler(),
    )


def sana(scheduler: Any, transformer: dict[str, Any]) -> Any:
    sizes: dict[str, Any] = {
        "sample_size": 16,
        "patch_size": 1,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 16,
        "caption_channels": 16,
    }
    blocks = {"block_out_channels": (8, 16), "layers_per_block": (1, 1), "qkv_multiscales": ((), (5,))}
    kinds = ("ResBlock", "EfficientViTBlock")
    vae = AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=kinds,
        decoder_block_types=kinds,
        **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in blocks.items()},
        upsample_block_type="interpolate",
        downsample_block_type="stride_conv",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    )
    text = Gemma2Config(**_WORDS, intermediate_size=32, num_hidden_layers=1, head_dim=8)
    return SanaPipeline(
        tokenizer=second_tokenizer(),
        text_encoder=Gemma2Model(text),
        vae=vae,
        transformer=SanaTransformer2DModel(**(sizes | transformer)),
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
