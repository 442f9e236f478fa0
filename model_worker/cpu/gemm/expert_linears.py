"""One projection of all experts of a layer as linear layers, in place of the tensor that transformers' modules have.

These index that tensor by an expert, and multiply with what they get. Here they get a stand-in for the matrix, and its
product is that of the expert's own linear layers: so these may stay encoded, and be packed as any others are. Knows
transformers' contract of expert modules. Knows no format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from model_worker.cpu.gemm.encoded_linear import EncodedLinear, EncodedWeight

_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
# The implementation of transformers that goes through experts one by one.
_ONE_BY_ONE = "eager"


class ExpertMatrix:
    """Stands for the matrix of an expert where it is multiplied: x @ matrix, x @ matrix.T and linear(x, matrix)."""

    def __init__(self, linears: Sequence[nn.Module], takes_turns: bool) -> None:
        self._linears = linears
        self._takes_turns = takes_turns

    @property
    def T(self) -> ExpertMatrix:
        """What is multiplied is the same: transformers has matrices either way."""
        return self

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (function is functional.linear or function in _PRODUCTS) and len(args) == 2 and not kwargs:
            return args[1]._multiply(args[0])
        return NotImplemented

    def _multiply(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = [linear(x) for linear in self._linears]
        if len(outputs) == 1:
            return outputs[0]
        return torch.stack(outputs, -1).flatten(-2) if self._takes_turns else torch.cat(outputs, dim=-1)


class ExpertLinears(nn.Module):
    """A projection of all experts. The outputs of an expert are those of its linear layers, one behind the other, or
    by turns."""

    def __init__(
        self, experts: Sequence[Sequence[nn.Module]], shape: tuple[int, ...], takes_turns: bool = False
    ) -> None:
        """`shape` is that of the tensor in whose place it is."""
        super().__init__()
        self._takes_turns = takes_turns
        self.experts = nn.ModuleList(nn.ModuleList(linears) for linears in experts)
        self.shape = torch.Size(shape)

    def __getitem__(self, expert: int | Tensor) -> ExpertMatrix:
        linears: Any = self.experts[int(expert)]
        return ExpertMatrix(list(linears), self._takes_turns)


def keep_experts(model: nn.Module, name: str, weight: EncodedWeight, dtype: torch.dtype) -> None:
    """Put encoded linear layers in the place of the tensor of this name, which has the weight of all experts."""
    owner, _, projection = name.rpartition(".")
    module: Any = model.get_submodule(owner)
    linears = [[EncodedLinear(part, None, dtype) for part in expert] for expert in weight.experts]
    delattr(module, projection)
    setattr(module, projection, ExpertLinears(linears, weight.shape, weight.takes_turns))
    # The others multiply with the tensor as a whole.
    if hasattr(module, "config"):
        module.config._experts_implementation = _ONE_BY_ONE
