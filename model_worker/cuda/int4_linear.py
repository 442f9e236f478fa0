"""Linear layers on a GPU whose weights stay in four bits: codes with a scale for each output and group of inputs.

Inputs are taken in steps of up to 128. A byte of a step holds a code of its first half, and above it the one as far
behind in the second half. The kernel is in int4_kernel.py. Knows no format of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

# How a group's codes become numbers: less one number for all, less that of the group, or plus one behind the scale.
MIDDLE, ZEROS, OFFSETS = range(3)
# Inputs of a step at most, and at least: a product of half of them is the smallest that a card has.
WIDEST_STEP, LEAST_STEP = 128, 32
# Tiles of outputs of a weight whose inputs are cut into pieces are no more (int4_kernel.PROGRAMS).
_COUNTERS = 256


class Packed(NamedTuple):
    """A weight [out, in]: codes u8 [out, in / 2], and scales [out, groups].

    `zeros` are i8 (ZEROS) or numbers (OFFSETS) [out, groups], or None, where all codes have `middle`.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    middle: int

    @property
    def kind(self) -> int:
        if self.zeros is None:
            return MIDDLE
        return OFFSETS if self.zeros.is_floating_point() else ZEROS


def step_of(group: int) -> int:
    """Return the inputs of a step by those of a group: the largest power of two that divides them, as far as it goes.
    0 for a group that has no steps."""
    step = min(WIDEST_STEP, group & -group)
    return step if step >= LEAST_STEP else 0


def pack(codes: Tensor, groups: int) -> Tensor:
    """Pack codes u8 [out, in] of so many groups into u8 [out, in / 2]."""
    halves: Tensor = codes.unflatten(1, (-1, 2, step_of(codes.shape[1] // groups) // 2))
    packed: Tensor = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    return packed


class Int4Linear(nn.Module):
    """A linear layer with packed `codes` u8 [out, in / 2], `scales` [out, groups] and perhaps
    `zeros`: i8 [out, groups] that are taken off codes, or numbers that are added to scaled ones.

    `middle` is taken off codes that have no zeros. Column i of the weight is for the input `order[i]`, if there is an
    order, i32 [in]. Outputs have the dtype of inputs.
    """

    order: Tensor | None
    arrived: Tensor

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        middle: int = 0,
        order: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = len(codes), 2 * codes.shape[1]
        self.middle = middle
        self.codes = _kept(codes)
        self.scales = _kept(scales)
        self.zeros = None if zeros is None else _kept(zeros)
        self.bias = None if bias is None else _kept(bias)
        self.register_buffer("order", order)
        # Counts programs within a product, and is zero between products.
        counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=codes.device)
        self.register_buffer("arrived", counters, persistent=False)

    @property
    def packed(self) -> Packed:
        return Packed(self.codes, self.scales, self.zeros, self.middle)

    @property
    def weight(self) -> Tensor:
        """Return a new copy of the decoded weight, f32[out, in]."""
        packed = self.packed
        groups = self.scales.shape[1]
        steps = packed.codes.unflatten(1, (-1, step_of(self.in_features // groups) // 2))
        codes = torch.stack([steps & 15, steps >> 4], 2).reshape(self.out_features, groups, -1).float()
        zeros = self.zeros
        codes -= zeros.float()[..., None] if zeros is not None and packed.kind == ZEROS else float(self.middle)
        codes *= self.scales.float()[..., None]
        if zeros is not None and packed.kind == OFFSETS:
            codes += zeros.float()[..., None]
        whole = codes.flatten(1)
        return whole if self.order is None else whole[:, self.order.long().argsort()]

    def forward(self, x: Tensor) -> Tensor:
        return int4_product(x, self.packed, self.order, self.bias, self.arrived)


def _kept(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().contiguous(), requires_grad=False)


def int4_product(x: Tensor, weight: Packed, order: Tensor | None, bias: Tensor | None, arrived: Tensor) -> Tensor:
    """Multiply `x` [..., in] by a weight whose column i is for the input `order[i]`, and add a bias [out]."""
    from model_worker.cuda.int4_kernel import multiply

    rows = x.reshape(-1, x.shape[-1])
    if order is not None:
        rows = rows.index_select(1, order)
    out = multiply(rows.contiguous(), weight, bias, arrived)
    return out.reshape(*x.shape[:-1], len(weight.codes))


def join_alike(linears: Sequence[Int4Linear]) -> bool:
    """Whether the parts of such layers of the same input, one behind the other, are those of one layer."""
    first = linears[0]
    return all(
        one.middle == first.middle
        and one.scales.shape[1] == first.scales.shape[1]
        and one.scales.dtype == first.scales.dtype
        and (None if one.zeros is None else one.zeros.dtype) == (None if first.zeros is None else first.zeros.dtype)
        and (one.order is None) == (first.order is None)
        and (one.order is None or first.order is None or torch.equal(one.order, first.order))
        for one in linears
    )
