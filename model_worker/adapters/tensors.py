"""Sorts an adapter's tensors by the module that they adapt.

Knows PEFT's names. Does not know any model: whether the modules exist and the shapes fit is for fitting.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from model_worker.adapters.config import AdapterConfig
from model_worker.adapters.refusal import MERGE, AdapterRefused

PREFIX = "base_model.model."
A = "lora_A.weight"
B = "lora_B.weight"
B_BIAS = "lora_B.bias"
MAGNITUDE = "lora_magnitude_vector"
EMBEDDING_A = "lora_embedding_A"
EMBEDDING_B = "lora_embedding_B"
# A copy of the base's weight that PEFT adds where the embedding or the output embedding is adapted.
BASE_WEIGHT = "base_layer.weight"
BASE_BIAS = "base_layer.bias"
# Vectors that take the place of those of some tokens.
TOKENS = "token_adapter.trainable_tokens_delta"
BIAS = "bias"
# The weight of a module that the adapter brings whole.
WEIGHT = "weight"

# By suffix; the longest is looked for first.
_PARTS = {
    A: A,
    B: B,
    B_BIAS: B_BIAS,
    f"{MAGNITUDE}.weight": MAGNITUDE,
    MAGNITUDE: MAGNITUDE,
    EMBEDDING_A: EMBEDDING_A,
    EMBEDDING_B: EMBEDDING_B,
    BASE_WEIGHT: BASE_WEIGHT,
    BASE_BIAS: BASE_BIAS,
    TOKENS: TOKENS,
}


@dataclass(slots=True)
class ModuleTensors:
    """The tensors of one module, by the constants above."""

    parts: dict[str, Tensor] = field(default_factory=dict)

    def pair(self, module: str) -> tuple[str, str] | None:
        """Return the names of the module's A and B. AdapterRefused if one of them is missing."""
        for a, b in ((A, B), (EMBEDDING_A, EMBEDDING_B)):
            if (a in self.parts) != (b in self.parts):
                there, missing = (a, b) if a in self.parts else (b, a)
                raise AdapterRefused(f"{module} has {there} and no {missing}: save the adapter again")
        pairs = [(a, b) for a, b in ((A, B), (EMBEDDING_A, EMBEDDING_B)) if a in self.parts]
        if len(pairs) > 1:
            raise AdapterRefused(f"{module} has {A} and {EMBEDDING_A}: save the adapter again")
        return pairs[0] if pairs else None


def by_module(tensors: Mapping[str, Tensor], config: AdapterConfig) -> dict[str, ModuleTensors]:
    """Return the tensors of each module. AdapterRefused names a tensor that is none of an adapter's."""
    modules: dict[str, ModuleTensors] = {}
    for name, tensor in tensors.items():
        module, part = _split(name, config)
        parts = modules.setdefault(module, ModuleTensors()).parts
        if part in parts:
            raise AdapterRefused(f"{module} has {part} twice: save the adapter again")
        parts[part] = tensor
    return modules


def _split(name: str, config: AdapterConfig) -> tuple[str, str]:
    """Return the name of a tensor's module, and its part."""
    if not name.startswith(PREFIX):
        raise AdapterRefused(f"tensor {name} has a name without {PREFIX}, which is not PEFT's: save it with peft")
    path = name.removeprefix(PREFIX)
    for suffix, part in _PARTS.items():
        if path.endswith(f".{suffix}"):
            return path.removesuffix(f".{suffix}"), part
    module, _, part = path.rpartition(".")
    if config.brings(module) and part in (WEIGHT, BIAS):
        return module, part
    if config.bias == "all" and part == BIAS:
        return module, BIAS
    raise AdapterRefused(f"tensor {name} is not a part of a LoRA adapter of linear modules or embeddings: {MERGE}")
