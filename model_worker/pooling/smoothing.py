"""Makes the inputs of linear layers even before layers become int8, without changing what a model computes.

A few inputs of an encoder's layers are many times as large as the others, in every text. Numbers of eight bits with one
scale for a token would leave the others a few steps. So each input is divided by a factor, and its column of the weight
multiplied by it (SmoothQuant, arXiv:2211.10438): the factor grows with the input, and shrinks with the column. Layers
that read the same tensor get the same factors, except for those that are named to stand apart. Knows no architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

# Inputs and columns below this count as this large.
_LEAST = 1e-5
# How much of an input's range moves into the weight: more costs the weights' precision. (Of 0.2 to 0.6 this left
# all-MiniLM-L6-v2's vectors the closest.)
_EXPONENT = 0.4


def smooth(model: nn.Module, run: Callable[[], object], apart: Collection[str] = ()) -> dict[str, Tensor]:
    """Multiply the weights of plain linear modules, by inputs as `run` has them.

    Modules whose names end in one of `apart` have factors of their own. Returns what the inputs of each module must be
    multiplied by now, by the module's name: see `scale_inputs`.
    """
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    peaks: dict[str, Tensor] = {}
    # The tensor that each module read first. It is kept, so that no other one gets its identity.
    read: dict[str, Tensor] = {}

    def look(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            tensor: Tensor = arguments[0]
            found = tensor.abs().flatten(0, -2).amax(0).float()
            peaks[name] = torch.maximum(peaks[name], found) if name in peaks else found
            read.setdefault(name, tensor)

        return hook

    hooks = [module.register_forward_pre_hook(look(name)) for name, module in linears.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[tuple[int, str], list[str]] = {}
    for name, tensor in read.items():
        own = name if name.rpartition(".")[2] in apart else ""
        groups.setdefault((id(tensor), own), []).append(name)
    scales: dict[str, Tensor] = {}
    for names in groups.values():
        factors = _factors([peaks[name] for name in names], [linears[name].weight for name in names])
        for name in names:
            weight = linears[name].weight
            linears[name].weight = nn.Parameter(weight * factors, requires_grad=False)
            scales[name] = 1 / factors
    return scales


def _factors(peaks: list[Tensor], weights: list[Tensor]) -> Tensor:
    inputs = torch.stack(peaks).amax(0).clamp_min(_LEAST)
    columns = torch.cat([weight.detach().float() for weight in weights]).abs().amax(0).clamp_min(_LEAST)
    return inputs**_EXPONENT / columns ** (1 - _EXPONENT)


def scale_inputs(model: nn.Module, scales: dict[str, Tensor]) -> None:
    """Let modules multiply their inputs by what `smooth` has returned."""
    for name, factors in scales.items():
        module: Any = model.get_submodule(name)
        module.input_scales = factors
        module.register_forward_pre_hook(_scaled)


def _scaled(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return (arguments[0] * module.input_scales, *arguments[1:])
