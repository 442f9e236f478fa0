"""Linear modules that take the same input, as one product. Their weights stay theirs, and lie one after the other.

Knows modules; knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model_worker.cuda.fp8_blocks import SIDE, BlockFp8Linear, block_product
from model_worker.cuda.fp8_linear import Fp8Linear, fp8_product
from model_worker.cuda.grouped_linear import GroupedLinear, grouped_product, join_alike

# Changes what modules have made of their input.
Change = Callable[[Sequence[nn.Module], Tensor, Tensor], None]


class JoinedLinear:
    """The outputs of several modules with the same input, side by side. Those that go together are one product.

    It holds no tensor: each call reads the weights through the modules' parameters. So their memory is free as
    soon as the modules' parameters are replaced.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        """Each module is plain, or of one of this package's classes. They have equal inputs, and all of them a bias or
        none."""
        runs: list[list[Any]] = []
        for linear in linears:
            if runs and _joins([*runs[-1], linear]):
                runs[-1].append(linear)
            else:
                runs.append([linear])
        self._linears = linears
        self._products = [_Product(run) for run in runs]

    def __call__(self, x: Tensor, change: Change | None = None) -> Tensor:
        """Return the outputs of all modules, side by side, as `change` changes them in place."""
        found = [product(x) for product in self._products]
        y = found[0] if len(found) == 1 else torch.cat(found, -1)
        if change is not None:
            change(self._linears, x, y)
        return y


def _joins(linears: Sequence[nn.Module]) -> bool:
    """Whether the parameters of modules, one behind the other, are those of one module with all of their outputs."""
    if len({type(linear) for linear in linears}) > 1:
        return False
    fours = [linear for linear in linears if isinstance(linear, GroupedLinear)]
    if fours:
        return join_alike(fours)
    # A block has outputs of one module.
    return all(not isinstance(one, BlockFp8Linear) or one.out_features % SIDE == 0 for one in linears[:-1])


class _Product:
    """One product with the weights of several modules, whose parameters become parts of one piece of memory."""

    def __init__(self, linears: Sequence[Any]) -> None:
        self._first = linears[0]
        self._outputs = sum(linear.out_features for linear in linears)
        if len(linears) > 1:
            for name, _ in list(self._first.named_parameters(recurse=False)):
                in_row = isinstance(self._first, Fp8Linear) and name == "scales"
                _lay_together([linear.get_parameter(name) for linear in linears], 1 if in_row else 0)

    def __call__(self, x: Tensor) -> Tensor:
        first = self._first
        added = None if first.bias is None else first.bias.as_strided((self._outputs,), (1,))
        if isinstance(first, Fp8Linear):
            return fp8_product(x, self._whole(first.codes), first.scales.as_strided((1, self._outputs), (1, 1)), added)
        if isinstance(first, BlockFp8Linear):
            groups = first.scales.shape[1]
            scales = first.scales.as_strided((-(-self._outputs // SIDE), groups), (groups, 1))
            return block_product(x, self._whole(first.codes), scales, added)
        if isinstance(first, GroupedLinear):
            codes, scales, zeros = first.packed[:3]
            zeros = None if zeros is None else self._whole(zeros)
            packed = first.packed._replace(codes=self._whole(codes), scales=self._whole(scales), zeros=zeros)
            return grouped_product(x, packed, first.order, added, first.arrived)
        return nn.functional.linear(x, self._whole(first.weight), added)

    def _whole(self, weight: Tensor) -> Tensor:
        return weight.as_strided((self._outputs, weight.shape[1]), (weight.shape[1], 1))


def _lie_together(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether parameters are one after the other already, as in the memory of a keeper (keeper/)."""
    first = parameters[0]
    place = first.storage_offset()
    for parameter in parameters:
        elsewhere = parameter.untyped_storage()._cdata != first.untyped_storage()._cdata
        if elsewhere or parameter.storage_offset() != place or not parameter.is_contiguous():
            return False
        place += parameter.numel()
    return True


def _lay_together(parameters: Sequence[nn.Parameter], outputs: int) -> None:
    """Put parameters one after the other, along the dimension of outputs."""
    if _lie_together(parameters):
        return
    with torch.no_grad():
        whole = torch.cat([parameter.detach() for parameter in parameters], outputs)
    for parameter, part in zip(
        parameters, whole.split([one.shape[outputs] for one in parameters], outputs), strict=True
    ):
        parameter.data = part
