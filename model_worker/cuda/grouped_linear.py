"""Linear layers on a GPU whose weights stay in four or eight bits: codes with a scale for each output and group of
inputs.

Inputs are taken in steps of up to 128. Of four bits, a byte of a step holds a code of its first half, and above it the
one as far behind in the second half. The kernel is in grouped_kernel.py. Knows no format of files.
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


class Coding(NamedTuple):
    """What codes of 4 or 8 bits are: the numbers of a table, i8[16], or less `middle`, where they have no zeros."""

    bits: int = 4
    middle: int = 0
    table: bytes = b""

    @property
    def numbers(self) -> int:
        """How many codes a byte has."""
        return 8 // self.bits


# Codes that are numbers.
FOUR_BITS = Coding()


class Packed(NamedTuple):
    """A weight [out, in]: codes u8 [out, bytes], and scales [out, groups], which are numbers, or u8: powers of two.

    `zeros` are whole numbers (ZEROS) or others (OFFSETS) [out, groups], or None.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    coding: Coding = FOUR_BITS

    @property
    def kind(self) -> int:
        if self.coding.table:
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
    """Pack codes u8 [out, in] of four bits, and of so many groups, into u8 [out, in / 2]."""
    halves: Tensor = codes.unflatten(1, (-1, 2, step_of(codes.shape[1] // groups) // 2))
    packed: Tensor = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    return packed


class GroupedLinear(nn.Module):
    """A linear layer with `codes` u8 [out, bytes], `scales` [out, groups] and perhaps `zeros`: whole numbers [out,
    groups] that are taken off codes, or others that are added to scaled ones.

    Column i of the weight is for the input `order[i]`, if there is an order, i32 [in]. Outputs have the dtype of
    inputs.
    """

    order: Tensor | None
    arrived: Tensor

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        coding: Coding = FOUR_BITS,
        order: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = len(codes), coding.numbers * codes.shape[1]
        self.coding = coding
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
        return Packed(self.codes, self.scales, self.zeros, self.coding)

    @property
    def weight(self) -> Tensor:
        """Return a new copy of the decoded weight, f32[out, in]."""
        numbers = self._numbers()
        zeros = self.zeros
        has_zeros = self.packed.kind == ZEROS
        numbers -= zeros.float()[..., None] if zeros is not None and has_zeros else float(self.coding.middle)
        numbers *= numbers_of(self.scales)[..., None]
        if zeros is not None and not has_zeros:
            numbers += zeros.float()[..., None]
        whole = numbers.flatten(1)
        return whole if self.order is None else whole[:, self.order.long().argsort()]

    def _numbers(self) -> Tensor:
        """Return the codes, or those of the table, f32 [out, groups, in of a group]."""
        groups = self.scales.shape[1]
        codes = self.codes.detach()
        if self.coding.bits == 4:
            steps = codes.unflatten(1, (-1, step_of(self.in_features // groups) // 2))
            codes = torch.stack([steps & 15, steps >> 4], 2)
        codes = codes.reshape(self.out_features, groups, -1)
        if not self.coding.table:
            return codes.float()
        table = torch.frombuffer(bytearray(self.coding.table), dtype=torch.int8).to(codes.device)
        return table[codes.int()].float()

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
        one.coding == first.coding
        and one.scales.shape[1] == first.scales.shape[1]
        and one.scales.dtype == first.scales.dtype
        and (None if one.zeros is None else one.zeros.dtype) == (None if first.zeros is None else first.zeros.dtype)
        and (one.order is None) == (first.order is None)
        and (one.order is None or first.order is None or torch.equal(one.order, first.order))
        for one in linears
    )
