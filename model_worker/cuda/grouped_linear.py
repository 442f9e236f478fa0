"""Linear layers on a GPU whose weights stay in four bits: codes with a scale for each output and group of inputs.

Inputs are taken in steps of up to 128. A byte of a step holds a code of its first half, and above it the one as far
behind in the second half. The kernel is in grouped_kernel.py. Knows no format of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

# How a group's codes become numbers: less one number for all, less that of the group, plus one behind the scale, or by
# a table.
MIDDLE, ZEROS, OFFSETS, TABLE = range(4)
# Inputs of a step at most, and at least: a product of half of them is the smallest that a card has.
WIDEST_STEP, LEAST_STEP = 128, 32
# Tiles of outputs of a weight whose inputs are cut into pieces are no more (grouped_kernel.PROGRAMS).
_COUNTERS = 256
# Of a float32: what lies below its exponent, and the largest exponent of a finite one.
_FRACTION_BITS, _MOST_EXPONENT = 23, 254


class Packed(NamedTuple):
    """A weight [out, in]: codes u8 [out, in / 2], and scales [out, groups], which are numbers, or u8: powers of two.

    `zeros` are i8 (ZEROS) or numbers (OFFSETS) [out, groups], or None, where all codes have `middle`, or `table` has
    the number of each code, i8[16].
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    middle: int
    table: bytes = b""

    @property
    def kind(self) -> int:
        if self.table:
            return TABLE
        if self.zeros is None:
            return MIDDLE
        return OFFSETS if self.zeros.is_floating_point() else ZEROS


def step_of(group: int) -> int:
    """Return the inputs of a step by those of a group: the largest power of two that divides them, as far as it goes.
    0 for a group that has no steps."""
    step = min(WIDEST_STEP, group & -group)
    return step if step >= LEAST_STEP else 0


def exponents_of(scales: Tensor) -> Tensor | None:
    """Return scales as u8: the exponents of two with 127 added. None if they are no such powers of normal numbers."""
    bits = scales.float().contiguous().view(torch.int32)
    exponents = (bits >> _FRACTION_BITS).clamp(1, _MOST_EXPONENT)
    return exponents.to(torch.uint8) if torch.equal(exponents << _FRACTION_BITS, bits) else None


def numbers_of(scales: Tensor) -> Tensor:
    """Return scales as numbers, f32."""
    if scales.dtype != torch.uint8:
        return scales.float()
    return (scales.int() << _FRACTION_BITS).view(torch.float32)


def pack(codes: Tensor, groups: int) -> Tensor:
    """Pack codes u8 [out, in] of so many groups into u8 [out, in / 2]."""
    halves: Tensor = codes.unflatten(1, (-1, 2, step_of(codes.shape[1] // groups) // 2))
    packed: Tensor = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    return packed


class GroupedLinear(nn.Module):
    """A linear layer with packed `codes` u8 [out, in / 2], `scales` [out, groups] and perhaps
    `zeros`: i8 [out, groups] that are taken off codes, or numbers that are added to scaled ones.

    `middle` is taken off codes that have no zeros. With a `table`, i8[16], its numbers take the place of codes. Column
    i of the weight is for the input `order[i]`, if there is an order, i32 [in]. Outputs have the dtype of inputs.
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
        table: bytes = b"",
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = len(codes), 2 * codes.shape[1]
        self.middle = middle
        self.table = table
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
        return Packed(self.codes, self.scales, self.zeros, self.middle, self.table)

    @property
    def weight(self) -> Tensor:
        """Return a new copy of the decoded weight, f32[out, in]."""
        packed = self.packed
        groups = self.scales.shape[1]
        steps = packed.codes.unflatten(1, (-1, step_of(self.in_features // groups) // 2))
        codes = torch.stack([steps & 15, steps >> 4], 2).reshape(self.out_features, groups, -1)
        if self.table:
            numbers = torch.frombuffer(bytearray(self.table), dtype=torch.int8).to(codes.device)
            codes = numbers[codes.int()]
        codes = codes.float()
        zeros = self.zeros
        codes -= zeros.float()[..., None] if zeros is not None and packed.kind == ZEROS else float(self.middle)
        codes *= numbers_of(self.scales)[..., None]
        if zeros is not None and packed.kind == OFFSETS:
            codes += zeros.float()[..., None]
        whole = codes.flatten(1)
        return whole if self.order is None else whole[:, self.order.long().argsort()]

    def forward(self, x: Tensor) -> Tensor:
        return grouped_product(x, self.packed, self.order, self.bias, self.arrived)


def _kept(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().contiguous(), requires_grad=False)


def grouped_product(x: Tensor, weight: Packed, order: Tensor | None, bias: Tensor | None, arrived: Tensor) -> Tensor:
    """Multiply `x` [..., in] by a weight whose column i is for the input `order[i]`, and add a bias [out]."""
    from model_worker.cuda.grouped_kernel import multiply

    rows = x.reshape(-1, x.shape[-1])
    if order is not None:
        rows = rows.index_select(1, order)
    out = multiply(rows.contiguous(), weight, bias, arrived)
    return out.reshape(*x.shape[:-1], len(weight.codes))


def join_alike(linears: Sequence[GroupedLinear]) -> bool:
    """Whether the parts of such layers of the same input, one behind the other, are those of one layer."""
    first = linears[0]
    return all(
        (one.middle, one.table) == (first.middle, first.table)
        and one.scales.shape[1] == first.scales.shape[1]
        and one.scales.dtype == first.scales.dtype
        and (None if one.zeros is None else one.zeros.dtype) == (None if first.zeros is None else first.zeros.dtype)
        and (one.order is None) == (first.order is None)
        and (one.order is None or first.order is None or torch.equal(one.order, first.order))
        for one in linears
    )
