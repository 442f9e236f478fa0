"""Linear layers whose outputs are several projections, as several linear layers: each is packed and scaled by itself.

Knows which modules hold such weights, by their names. What they compute stays the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# The parts of a joined weight, in order, by the name of its module (as ModernBERT has them).
_PARTS = {"Wqkv": ("query", "key", "value"), "Wi": ("gate", "up")}


class JoinedLinear(nn.Module):
    """Linear layers that read the same input. Their outputs lie one after another."""

    @property
    def in_features(self) -> int:
        first: Any = next(self.children())
        return int(first.in_features)

    @property
    def out_features(self) -> int:
        parts: list[Any] = list(self.children())
        return sum(int(part.out_features) for part in parts)

    @property
    def weight(self) -> Tensor:
        return torch.cat([_own_weight(part) for part in self.children()])

    @property
    def bias(self) -> Tensor | None:
        parts: list[Any] = list(self.children())
        return None if any(part.bias is None for part in parts) else torch.cat([part.bias for part in parts])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.children()], dim=-1)


def separate_joined(model: nn.Module) -> None:
    """Replace the joined linear modules of a model by their parts. Their weights are views of the old ones."""
    for path, module in list(model.named_modules()):
        names = _PARTS.get(path.rpartition(".")[2])
        if names is None or type(module) is not nn.Linear or module.out_features % len(names):
            continue
        joined = JoinedLinear()
        biases = [None] * len(names) if module.bias is None else module.bias.detach().chunk(len(names))
        for name, weight, bias in zip(names, module.weight.detach().chunk(len(names)), biases, strict=True):
            joined.add_module(name, _linear(weight, bias))
        model.set_submodule(path, joined)


def _own_weight(part: Any) -> Tensor:
    """Return the weight of a part, for inputs that it has not multiplied."""
    scales: Tensor | None = getattr(part, "input_scales", None)
    weight: Tensor = part.weight
    return weight if scales is None else weight * scales


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear.eval()
