"""From texts to the last hidden state of each token: the model without its head, packed or in padded groups.

Knows how transformers' modules are called. Does not know what becomes of the hidden states.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from model_worker.pooling.attention import packed
from model_worker.pooling.texts import Texts


class Backbone(Protocol):
    """Computes the last hidden states of texts, [T, width]."""

    @property
    def description(self) -> str:
        """What computes the texts, in words."""
        ...

    def __call__(self, texts: Texts) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Packed:
    """All tokens in one row, without padding. Positions begin at `first_position` in each text."""

    model: nn.Module
    first_position: int
    description: str = "packed texts"

    def __call__(self, texts: Texts) -> Tensor:
        arguments = _arguments(self.model, texts.types if texts.types is not None else torch.zeros_like(texts.tokens))
        positions = (texts.positions + self.first_position)[None]
        with packed(texts):
            output = self.model(input_ids=texts.tokens[None], position_ids=positions, **arguments)
        hidden: Tensor = output.last_hidden_state
        return hidden[0]


@dataclass(frozen=True, eq=False)
class Padded:
    """Groups of texts of like length, each padded to its longest text, through the model's own attention."""

    model: nn.Module
    padding: int
    description: str = "padded groups of like length"

    def __call__(self, texts: Texts) -> Tensor:
        return torch.cat([self._group(group) for group in texts.groups()])

    def _group(self, texts: Texts) -> Tensor:
        types = torch.zeros_like(texts.tokens) if texts.types is None else texts.types
        output = self.model(
            input_ids=texts.pad(texts.tokens, self.padding),
            attention_mask=texts.visible.long(),
            **_arguments(self.model, texts.pad(types)),
        )
        hidden: Tensor = output.last_hidden_state
        return hidden[texts.mask]


def _arguments(model: nn.Module, types: Tensor) -> dict[str, Any]:
    """Return the arguments that only some models take."""
    kind: Any = type(model)
    taken = parameters(kind)
    arguments: dict[str, Any] = {}
    if "token_type_ids" in taken:
        arguments["token_type_ids"] = types if types.dim() == 2 else types[None]
    if "use_cache" in taken:
        arguments["use_cache"] = False
    return arguments


@functools.cache
def parameters(model: Any) -> frozenset[str]:
    """Return the names of the arguments of a module's forward pass."""
    return frozenset(inspect.signature(model.forward).parameters)
