"""Takes a composite model apart: its text model, which everything that serves text can run, and its image encoder.

Knows where transformers keeps the parts. Does not know how they are run.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep

from model_worker.vision.family import family_of

log = logging.getLogger(__name__)

# Names of the decoder within the model of a composite.
_DECODERS = ("language_model", "text_model")
_CAP = "final_logit_softcapping"
# Instructions without which a CPU computes bfloat16 products several times slower than float32 ones.
_BFLOAT16_INSTRUCTIONS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


class TextModel(PreTrainedModel):
    """The decoder and the output embedding of a composite model. Takes tokens, and knows nothing of images."""

    def __init__(self, composite: PreTrainedModel, decoder: PreTrainedModel) -> None:
        super().__init__(decoder.config)
        self.model: Any = decoder
        self.lm_head: Any = composite.get_output_embeddings()
        self.generation_config = composite.generation_config

    def get_input_embeddings(self) -> nn.Module:
        embedding: nn.Module = self.model.get_input_embeddings()
        return embedding

    def get_output_embeddings(self) -> nn.Module:
        head: nn.Module = self.lm_head
        return head

    def get_decoder(self) -> nn.Module:
        decoder: nn.Module = self.model
        return decoder

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        use_cache: bool = False,
        **added: Any,
    ) -> CausalLMOutputWithPast:
        hidden_states = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=use_cache,
            **added,
        ).last_hidden_state
        logits = self.lm_head(slice_logits_to_keep(hidden_states, logits_to_keep))
        return CausalLMOutputWithPast(logits=logits)


class CappedTextModel(TextModel):
    """A text model with a soft cap on its logits."""

    def forward(self, *arguments: Any, **named: Any) -> CausalLMOutputWithPast:
        output = super().forward(*arguments, **named)
        cap = self.config.final_logit_softcapping
        output.logits = cap * torch.tanh(output.logits / cap)
        return output


def text_model(composite: PreTrainedModel) -> PreTrainedModel:
    """Return the text model of a composite, on the same weights, under the composite's name."""
    decoder = decoder_of(composite)
    # transformers looks into the module of a class to learn whether its attention can be set.
    scope = {"__module__": type(decoder).__module__}
    base = CappedTextModel if _caps_logits(composite, decoder) else TextModel
    named: Any = type(type(composite).__name__, (base,), scope)
    for flag in ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn", "_supports_attention_backend"):
        setattr(named, flag, getattr(decoder, flag, False))
    text: PreTrainedModel = named(composite, decoder)
    text.eval()
    return text


def _caps_logits(composite: PreTrainedModel, decoder: PreTrainedModel) -> bool:
    """Whether the composite's forward pass caps its logits, and its config says how."""
    code = inspect.unwrap(type(composite).forward).__code__
    return _CAP in (*code.co_names, *code.co_consts) and getattr(decoder.config, _CAP, None) is not None


def decoder_of(composite: PreTrainedModel) -> PreTrainedModel:
    """Return the module that computes hidden states from embeddings."""
    inner: Any = composite.model
    decoder: PreTrainedModel = next(getattr(inner, name) for name in _DECODERS if hasattr(inner, name))
    return decoder


def text_modules(composite: PreTrainedModel) -> set[nn.Module]:
    """Return the modules that compute text: the decoder's, and the output embedding.

    Empty, with a line in the log, where they are not found in a type whose images are not served. ValueError where they
    are served.
    """
    try:
        return {*decoder_of(composite).modules(), composite.get_output_embeddings()}
    except (AttributeError, StopIteration):
        kind = composite.config.model_type
        fault = f"no text model is found in {kind} under model.{' or model.'.join(_DECODERS)}"
        if family_of(composite.config) is not None:
            raise ValueError(
                f"{fault}: this version of transformers ({transformers.__version__}) keeps it elsewhere, so install "
                "one that pyproject.toml allows"
            ) from None
        log.warning("%s: all of its weights are decoded", fault)
        return set()


def tower_parameters(composite: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters beside those of the text model: the vision tower's, and what projects its features."""
    text = {id(parameter) for parameter in decoder_of(composite).parameters()}
    text |= {id(parameter) for parameter in composite.get_output_embeddings().parameters()}
    return [parameter for parameter in composite.parameters() if id(parameter) not in text]


def encoder_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type to encode in: half types are slower than float32 on a CPU without instructions for them."""
    if device.type != "cpu":
        return dtype
    fast: Any = torch.cpu
    known = [getattr(fast, name, None) for name in _BFLOAT16_INSTRUCTIONS]
    return dtype if any(has() for has in known if has is not None) else torch.float32
