"""The fast way of encoders on a CPU: their layers in one compiled call, beside transformers' embeddings.

Knows how texts become the arguments of that call. That it gives the model's own states is proven at load (verify.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model_worker.cpu.encoder.layers import EncoderLayers
from model_worker.cpu.encoder.pattern import require_form
from model_worker.cpu.gemm.packed_linear import pack_linears
from model_worker.pooling.backbone import parameters
from model_worker.pooling.texts import Texts
from model_worker.pooling.torch_threads import one_thread


@dataclass(frozen=True, eq=False)
class Fused:
    """All tokens in one row, through compiled layers. Positions begin at `first_position` in each text."""

    model: Any
    layers: EncoderLayers
    first_position: int
    description: str = "packed texts, fused layers"

    def __call__(self, texts: Texts) -> Tensor:
        embeddings = self.model.embeddings
        kind: Any = type(embeddings)
        arguments = {"input_ids": texts.tokens[None]}
        if "position_ids" in parameters(kind):
            arguments["position_ids"] = (texts.positions + self.first_position)[None]
        if "token_type_ids" in parameters(kind):
            types = torch.zeros_like(texts.tokens) if texts.types is None else texts.types
            arguments["token_type_ids"] = types[None]
        with one_thread():
            embedded = embeddings(**arguments)
            if hasattr(self.model, "embeddings_project"):
                embedded = self.model.embeddings_project(embedded)
            # Embeddings end in a norm or a product, so nothing else has this memory: the layers write into it.
            states = embedded[0].float().contiguous()
            return self.layers.run(states, texts.starts, texts.seen).to(embedded.dtype)


def fused(model: nn.Module, padding: int) -> Iterator[Fused]:
    """Set up one way to count positions after another; int8 layers with activations of eight bits before those of
    sixteen. UnsupportedPattern for a model of another form (cpu/encoder/pattern.py).

    Its linear modules are packed, which changes what they compute by rounding only.
    """
    require_form(model)
    pack_linears(model)
    for coarse in (True, False):
        layers = EncoderLayers(model, coarse)
        yield Fused(model, layers, 0)
        # RoBERTa and its kin count from behind the padding token's id.
        yield Fused(model, layers, padding + 1)
        if not layers.is_int8:
            break
