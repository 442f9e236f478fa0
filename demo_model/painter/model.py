"""The painter's modules: tokenizer, text encoder, denoiser, VAE and schedule, as a Stable Diffusion of diffusers.

Knows the sizes, and how to write the folder. Does not know training.
"""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

from demo_model.painter.drawing import SIDE
from demo_model.painter.scenes import vocabulary

# Tokens of a description: the server takes as many of every pipeline of this class.
TOKENS = 77
_WIDTH = 128
_START, _END, _UNKNOWN = "<start>", "<end>", "<unknown>"
# Pixels of a side for one of its latents.
SCALE = 4


def new_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are words. It is written for CLIP: what is behind the end is the end again."""
    tokens = {text: i for i, text in enumerate([_START, _END, _UNKNOWN, *vocabulary()])}
    made = Tokenizer(models.WordLevel(tokens, unk_token=_UNKNOWN))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits(True)])
    made.post_processor = processors.TemplateProcessing(
        single=f"{_START} $A {_END}", special_tokens=[(_START, tokens[_START]), (_END, tokens[_END])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=_START,
        eos_token=_END,
        pad_token=_END,
        unk_token=_UNKNOWN,
        model_max_length=TOKENS,
    )


def new_text_encoder(tokenizer: PreTrainedTokenizerFast) -> Any:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        projection_dim=_WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def new_denoiser() -> Any:
    return UNet2DConditionModel(
        sample_size=SIDE // SCALE,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(48, 64, 64),
        layers_per_block=1,
        cross_attention_dim=_WIDTH,
        attention_head_dim=4,
        norm_num_groups=8,
    )


def new_vae() -> Any:
    return AutoencoderKL(
        sample_size=SIDE,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(24, 32, 48),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        mid_block_add_attention=False,
    )


def new_schedule() -> Any:
    """A schedule that ends in noise alone, so that also the brightness of a picture comes from its description."""
    return DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        clip_sample=False,
        set_alpha_to_one=True,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        steps_offset=1,
    )


def save(folder: Path, tokenizer: Any, text_encoder: Any, denoiser: Any, vae: Any) -> None:
    """Write the pipeline, with weights in float16."""
    pipe = StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=denoiser,
        scheduler=new_schedule(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.to(dtype=torch.float16).save_pretrained(folder)
    pipe.to(dtype=torch.float32)
