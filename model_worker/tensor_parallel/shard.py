"""Makes one rank's part of a model: narrower parameters, and modules that join what the ranks compute.

The result is a plain model with plain tensors. Knows modules and plans. Does not know files, nor how ranks exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model_worker.joined_linear import JoinedLinear
from model_worker.tensor_parallel.plan import Cut, SplitPlan

# Reads a part of a tensor: the dimension, and where it begins and ends there.
ReadPart = Callable[[int, int, int], Tensor]


class Joining(Protocol):
    """What joins the parts of all ranks."""

    rank: int

    def sum(self, part: Tensor) -> Tensor: ...

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor: ...


def part_of(read: ReadPart, cut: Cut, size: int, rank: int, ranks: int) -> Tensor:
    """Return a rank's part of a parameter with so many elements in the cut dimension, in memory of its own."""
    pieces = [read(cut.dim, first, last) for first, last in cut.bounds(size, rank, ranks)]
    # A view would keep the whole tensor in memory.
    return (torch.cat(pieces, cut.dim) if len(pieces) > 1 else pieces[0]).clone(memory_format=torch.contiguous_format)


def cut_model(model: PreTrainedModel, plan: SplitPlan, rank: int, done: dict[str, Tensor]) -> None:
    """Give each planned parameter a rank's part: that in `done`, by name, or else one of what the model has."""
    # A tied weight of an embedding that stays whole needs no copy: the part is a view of it.
    tied = _shared(model)
    for name, cut in plan.cuts.items():
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        whole = module._parameters.get(last)
        if whole is None:
            continue
        part = done.get(name)
        if part is None and name in tied and cut.packed == 1:
            [(first, end)] = cut.bounds(whole.shape[cut.dim], rank, plan.ranks)
            part = whole.data.narrow(cut.dim, first, end - first)
        elif part is None:
            part = part_of(_reader_of(whole.data), cut, whole.shape[cut.dim], rank, plan.ranks)
        module._parameters[last] = nn.Parameter(part, requires_grad=False)
    for name, groups in plan.groups.items():
        attention: Any = model.get_submodule(name)
        if hasattr(attention, "num_key_value_groups"):
            attention.num_key_value_groups = groups


def join_parts(model: PreTrainedModel, plan: SplitPlan, joining: Joining, sizes: dict[str, int]) -> None:
    """Have the modules whose outputs are joined do so. `sizes` are whole ones, by name of the parameter that is cut."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and f"{name}.weight" in plan.cuts:
            module.out_features, module.in_features = module.weight.shape
    for name, count in plan.experts.items():
        _lie_apart(model.get_submodule(name), *Cut(0, plan.ranks).bounds(count, joining.rank, plan.ranks)[0])
    for name in plan.summed:
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear):
            module.register_forward_hook(_sums(joining))
            continue
        if joining.rank:
            # It is added once, by the first rank.
            module.register_parameter("bias", None)
        [own] = _bounds(name, plan, sizes, [joining.rank])
        model.set_submodule(name, JoinedLinear(module, joining.sum, own if name in plan.takes_part else None))
    for name in plan.gathered:
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        widths = [end - first for first, end in _bounds(name, plan, sizes, range(plan.ranks))]
        model.set_submodule(name, JoinedLinear(module, partial(joining.gather, widths=widths), None))


def _bounds(name: str, plan: SplitPlan, sizes: dict[str, int], ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return where the parts of ranks begin and end in what a module has cut."""
    weight = f"{name}.weight"
    return [plan.cuts[weight].bounds(sizes[weight], rank, plan.ranks)[0] for rank in ranks]


def _lie_apart(module: Any, first: int, end: int) -> None:
    """Have a module of experts compute those from `first` to `end`, which it has. The others' tokens count nothing."""
    own = end - first
    module.num_experts = own
    # transformers' sign that a number behind the last one is that of no expert here.
    module._is_expert_parallel = True

    def hook(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs, chosen, weights = arguments
        elsewhere = (chosen < first) | (chosen >= end)
        return inputs, (chosen - first).masked_fill(elsewhere, own), weights.masked_fill(elsewhere, 0.0)

    module.register_forward_pre_hook(hook)


def _sums(joining: Joining) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def hook(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        return joining.sum(output)

    return hook


def _reader_of(tensor: Tensor) -> ReadPart:
    return lambda dim, first, last: tensor.narrow(dim, first, last - first)


def _shared(model: nn.Module) -> set[str]:
    """Return the names of parameters that have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for several in names.values() if len(several) > 1 for name in several}
