"""Weights in codes with a scale for each group of inputs, as a GPU multiplies them: their form, and layers of them.

Does not know files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.cpu.gemm.weight_format import PANEL
from model_worker.cuda.grouped_linear import Coding, GroupedLinear, Packed, exponents_of, pack, step_of
from shared.weight_codes import Codes, Grouped

_TABLE_CODES = 16
# The type of scales that are powers of two: their exponents.
_POWERS = torch.uint8
# The least number that such an exponent means.
_LEAST_POWER = np.float32(2.0**-126)


@dataclass(frozen=True)
class Groups:
    """Codes with a scale for each group of so many inputs, and zeros, offsets, a table or none of them."""

    group: int
    scales: torch.dtype
    zeros: bool
    offsets: torch.dtype | None
    coding: Coding
    ordered: bool

    @property
    def name(self) -> str:
        scales = "scales of powers of two" if self.scales == _POWERS else f"{_said(self.scales)} scales"
        parts = [f"groups of {self.group}", scales]
        if self.offsets is not None:
            parts.append(f"{_said(self.offsets)} offsets")
        if self.coding.table:
            parts.append("a table")
        else:
            parts.append("zeros" if self.zeros else f"a zero of {self.coding.middle}")
        if self.ordered:
            parts.append("inputs in an order")
        bits = "four" if self.coding.bits == 4 else "eight"
        return f"in {bits} bits with {', '.join(parts)}"

    def layer(self, weight: EncodedWeight, bias: Tensor | None) -> GroupedLinear:
        """Return a layer whose numbers have these types, read some outputs at a time.

        Those that the types do not hold stay as they are: what is computed is right, and is not what was timed.
        """
        read = weight.codes
        assert read is not None
        outputs = weight.shape[0]
        starts = range(0, outputs, weight.step)
        of_powers = self.scales == _POWERS
        pieces = [_packed(read(first, min(first + weight.step, outputs)), self.coding, of_powers) for first in starts]
        codes, scales = (torch.cat(parts) for parts in ([one.codes for one in pieces], [one.scales for one in pieces]))
        order = read(0, min(PANEL, outputs)).order
        columns = None if order is None else torch.from_numpy(order)
        parts = [one.zeros for one in pieces if one.zeros is not None]
        zeros = torch.cat(parts) if parts else None
        if zeros is not None and self.offsets is not None:
            zeros = _narrow(zeros, self.offsets)
        return GroupedLinear(codes, _narrow(scales, self.scales), zeros, self.coding, columns, bias)

    def with_wide_numbers(self) -> Groups:
        """Return the form whose types hold the numbers of any."""
        wide = torch.float32
        return replace(self, scales=wide, offsets=None if self.offsets is None else wide)


def groups_of(weight: EncodedWeight) -> Groups | None:
    """Return the form of a weight [outputs, inputs]; None for one that is not multiplied so."""
    read = weight.codes
    if read is None:
        return None
    outputs, inputs = weight.shape
    few = read(0, min(PANEL, outputs))
    group = inputs // few.scales.groups
    table = b"" if few.table is None else _table_of(few)
    has_zeros = not isinstance(few.zeros, int) or few.zeros != 0
    fits = table is not None and group * few.scales.groups == inputs
    if few.minimums is not None:
        fits = fits and few.minimums.groups == few.scales.groups and not has_zeros
    if not fits or table is None or not step_of(group):
        return None
    # Codes of fewer bits lie in as many as there is room for.
    coding = Coding(4 if few.bits <= 4 else 8, few.zeros if isinstance(few.zeros, int) else 0, table)
    zeros = not isinstance(few.zeros, int)
    offsets = None if few.minimums is None else _type_of(few.minimums)
    scales = _POWERS if table and _has_powers(weight, read) else _type_of(few.scales)
    return Groups(group, scales, zeros, offsets, coding, few.order is not None)


def have_one_order(experts: Sequence[Sequence[EncodedWeight]]) -> bool:
    """Whether the matrices of each expert have their inputs in the same order. All have codes."""
    for parts in experts:
        orders = [part.codes(0, min(PANEL, part.shape[0])).order for part in parts if part.codes is not None]
        found = [order for order in orders if order is not None]
        if found and (len(found) < len(orders) or not all(np.array_equal(order, found[0]) for order in found)):
            return False
    return True


def _table_of(few: Codes) -> bytes | None:
    """Return the numbers of codes, i8[16]. None for others, and where something is taken off or added to them."""
    assert few.table is not None
    plain = few.table.dtype == np.int8 and len(few.table) == _TABLE_CODES
    return few.table.tobytes() if plain and few.minimums is None and few.zeros == 0 else None


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _has_powers(weight: EncodedWeight, read: Callable[[int, int], Codes]) -> bool:
    """Whether all scales of a weight are powers of two that a byte holds. Codes are read where one is not."""

    def fit(first: int) -> bool:
        last = min(first + weight.step, weight.shape[0])
        if exponents_of(torch.from_numpy(weight.code_scales(first, last))) is not None:
            return True
        return exponents_of(_of_powers(read(first, last))) is not None

    return all(fit(first) for first in range(0, weight.shape[0], weight.step))


def _of_powers(codes: Codes) -> Tensor:
    """Return the scales of codes with a table, f32 [outputs, groups]. Of groups whose numbers are all zero, those that
    are too small for a byte are the least power of two: checkpoints have such groups."""
    assert codes.table is not None
    scales = codes.scales.values
    small = np.abs(scales) < _LEAST_POWER
    if small.any():
        numbers = codes.table[codes.codes].reshape(*scales.shape, -1)
        scales = np.where(small & ~numbers.any(-1), _LEAST_POWER, scales)
    return torch.from_numpy(scales)


def _type_of(numbers: Grouped) -> torch.dtype:
    """Return the least type that holds all numbers of a weight as they are, told by some of them."""
    if numbers.steps is None and numbers.base.dtype == np.float16:
        return torch.float16
    values = torch.from_numpy(numbers.values)
    # Numbers of a file in bfloat16 are, if they are neither tiny nor large, float16, too.
    types = torch.bfloat16, torch.float16
    return next((dtype for dtype in types if _narrow(values, dtype) is not values), torch.float32)


def _packed(codes: Codes, coding: Coding, of_powers: bool) -> Packed:
    """Return the tensors of a layer with these outputs. Scales are numbers, which may be powers of two."""
    scales = _of_powers(codes) if of_powers else torch.from_numpy(codes.scales.values)
    zeros: Tensor | None = None
    if codes.minimums is not None:
        zeros = torch.from_numpy(codes.minimums.values)
    elif not isinstance(codes.zeros, int):
        zeros = torch.from_numpy(codes.zeros).to(torch.int8 if coding.bits == 4 else torch.int16)
    found = torch.from_numpy(codes.codes)
    return Packed(pack(found, scales.shape[1]) if coding.bits == 4 else found, scales, zeros, coding)


def _narrow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers f32 in this type, if it holds them all; else as they are."""
    if dtype == _POWERS:
        powers = exponents_of(values)
        return values if powers is None else powers
    narrow = values.to(dtype)
    return narrow if torch.equal(narrow.float(), values) else values
