"""The painter's modules: tokenizer, text encoder, denoiser, VAE and schedule, as a PixArt of diffusers.

Knows the sizes, and how to write the folder. Does not know training.
"""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from demo_model.painter.drawing import SIDE
from demo_model.painter.scenes import vocabulary

# Tokens of a description: the server takes as many of every pipeline of this class.
TOKENS = 120
TEXT_WIDTH = 96
_WIDTH = 128
_LAYERS = 6
_HEAD = 32
_PATCH = 8
_PAD, _END, _UNKNOWN = "<pad>", "<end>", "<unknown>"
_TIMES = 1000
# How much stronger the noise of a timestep is than in the cosine schedule: a patch has many pixels, which together
# show through noise that each alone drowns in.
_NOISE = 6.0
# What the VAE's norm is kept constant with: large beside pixels, and exact in float16.
_STEADY = 64.0
# Pixels are divided by their usual deviation.
_SCALE = 1.5


def new_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are words."""
    tokens = {text: i for i, text in enumerate([_PAD, _END, _UNKNOWN, *vocabulary()])}
    made = Tokenizer(models.WordLevel(tokens, unk_token=_UNKNOWN))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits(True)])
    made.post_processor = processors.TemplateProcessing(single=f"$A {_END}", special_tokens=[(_END, tokens[_END])])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=_END, pad_token=_PAD, unk_token=_UNKNOWN, model_max_length=TOKENS
    )


def new_text_encoder(tokenizer: PreTrainedTokenizerFast) -> Any:
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=TEXT_WIDTH // 4,
        d_ff=2 * TEXT_WIDTH,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        relative_attention_num_buckets=32,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return T5EncoderModel(config)


def new_denoiser() -> Any:
    return PixArtTransformer2DModel(
        sample_size=SIDE,
        patch_size=_PATCH,
        in_channels=3,
        out_channels=3,
        num_layers=_LAYERS,
        num_attention_heads=_WIDTH // _HEAD,
        attention_head_dim=_HEAD,
        cross_attention_dim=_WIDTH,
        caption_channels=TEXT_WIDTH,
        use_additional_conditions=False,
    )


@torch.no_grad()
def new_vae() -> Any:
    """A VAE whose latents are the pixels: a picture is small, and the denoiser's patches do what a VAE is for.

    Its blocks add nothing. The last norm sees the pixels, their negatives, and a constant that is so large that the
    norm divides by it. What follows is x * sigmoid(x), and x * sigmoid(x) - -x * sigmoid(-x) is x.
    """
    vae = AutoencoderKL(
        sample_size=SIDE,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(8,),
        layers_per_block=1,
        latent_channels=3,
        norm_num_groups=1,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=_SCALE,
    )
    for half in (vae.encoder, vae.decoder):
        for name, value in half.named_parameters():
            if not name.endswith(("norm1.weight", "norm2.weight", "conv_norm_out.weight")):
                value.zero_()
        for i in range(3):
            half.conv_in.weight[i, i, 1, 1], half.conv_in.weight[3 + i, i, 1, 1] = 1, -1
            # The norm divides by the constant's deviation: there are two of it among eight.
            half.conv_out.weight[i, i, 1, 1] = _STEADY / 2
            half.conv_out.weight[i, 3 + i, 1, 1] = -_STEADY / 2
        half.conv_in.bias[6], half.conv_in.bias[7] = _STEADY, -_STEADY
    # No deviation: a drawing has one latent.
    vae.encoder.conv_out.bias[3:] = -30
    return vae


def new_schedule() -> Any:
    """A schedule that ends in noise alone, so that also the brightness of a picture comes from its description."""
    return DDIMScheduler(
        trained_betas=_betas(),
        clip_sample=False,
        set_alpha_to_one=True,
        prediction_type="sample",
        timestep_spacing="trailing",
        steps_offset=1,
    )


def _betas() -> list[float]:
    """Return the noise that each timestep adds, so that the last leaves nothing of the picture."""
    strengths = [_NOISE * math.tan(math.pi / 2 * i / _TIMES) for i in range(_TIMES)] + [math.inf]
    left = [1 / (1 + strength**2) for strength in strengths]
    return [1 - after / before for before, after in pairwise(left)]


def save(folder: Path, tokenizer: Any, text_encoder: Any, denoiser: Any) -> None:
    """Write the pipeline, with weights in float16."""
    pipe = PixArtAlphaPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, vae=new_vae(), transformer=denoiser, scheduler=new_schedule()
    )
    pipe.to(dtype=torch.float16).save_pretrained(folder)
    pipe.to(dtype=torch.float32)
