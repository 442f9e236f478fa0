"""Takes a loaded composite model apart, and verifies that its text model alone gives the logits of the whole."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from model_worker.hearing.sounds import SoundEncoder
from model_worker.loading import verify
from model_worker.model import ModelRefused, first_line
from model_worker.vision.composite import encoder_dtype, text_model, tower_parameters
from model_worker.vision.encoder import Encoder, make_encoder
from model_worker.vision.family import Sight, family_of


def take_apart(
    composite: PreTrainedModel, device: torch.device, vision: bool
) -> tuple[PreTrainedModel, Encoder | None]:
    """Return the text model and, with `vision`, the encoder of images. They share no weights."""
    architecture = type(composite).__name__
    family = family_of(composite.config)
    try:
        text = text_model(composite)
        if family is None or family.sight != Sight.PROMPT:
            _check(composite, text, device)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, StopIteration) as error:
        if isinstance(error, ModelRefused):
            raise
        raise ModelRefused(architecture, f"its text model cannot be run alone: {first_line(error)}") from error
    if not vision or family is None:
        return text, None
    dtype = encoder_dtype(composite.dtype, device)
    for parameter in tower_parameters(composite):
        parameter.data = parameter.data.to(dtype)
    encoder = make_encoder(composite, family, dtype, device, SoundEncoder if family.hears else Encoder)
    # The text model has it, and may pack it.
    composite.set_output_embeddings(nn.Identity())
    return text, encoder


def _check(composite: PreTrainedModel, text: PreTrainedModel, device: torch.device) -> None:
    """Compare the logits of plain tokens, which both compute with the same attention."""
    tokens = verify.tokens(text.config, device)[:1]
    with torch.inference_mode():
        text.set_attn_implementation("eager")
        whole = composite(input_ids=tokens, use_cache=False).logits
        alone = text(input_ids=tokens).logits
    if not torch.allclose(whole, alone, rtol=1e-2, atol=1e-3):
        raise ModelRefused(
            type(composite).__name__, "it does more to the logits of its text model than an output embedding"
        )
