"""A part of a weight in codes of a few bits, in the one form to which readers of checkpoints bring every layout.

A reader gives some outputs at a time (64 and more), so that no weight exists dequantised:

    codes = Codes(codes=nibbles, bits=4, scales=Grouped(d), zeros=8)                                     # Q4_0
    codes = Codes(codes=nibbles, bits=4, scales=Grouped(d, sc), zeros=0, minimums=Grouped(-dmin, mn))    # Q4_K
    codes = Codes(codes=nibbles, bits=4, scales=Grouped(scales), zeros=zero_points)                      # GPTQ, AWQ

    codes = Codes(codes=numbers, bits=8, scales=Grouped(scales), zeros=0, table=E4M3)                    # FP8

Knows numbers. Does not know files, nor how codes lie in memory when they are multiplied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


def _values_of_e4m3() -> NDArray[np.float32]:
    """Return the value of each code of 8-bit floats with four bits of exponent and three of mantissa."""
    codes = np.arange(256)
    exponents = codes >> 3 & 15
    mantissas = codes & 7
    magnitudes = np.where(exponents, (8 + mantissas) * 2.0 ** (exponents - 10), mantissas * 2.0**-9)
    magnitudes[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes < 128, magnitudes, -magnitudes).astype(np.float32)


# The table of FP8 weights.
E4M3 = _values_of_e4m3()


class Grouped(NamedTuple):
    """A number for each output and group of inputs: base[o, b] * steps[o, g].

    Groups are equal parts of a row: as many as an array has columns. A group of `base` holds whole groups of `steps`.
    """

    base: NDArray[Any]  # float16 or float32 [outputs, groups]
    steps: NDArray[Any] | None = None  # int8 or uint8 [outputs, groups]: whole multiples of the base; None: all 1

    @property
    def groups(self) -> int:
        """Groups of each output."""
        return int((self.base if self.steps is None else self.steps).shape[1])

    @property
    def values(self) -> NDArray[np.float32]:
        """Return the numbers, float32 [outputs, groups]."""
        base = self.base.astype(np.float32)
        if self.steps is None:
            return base
        repeated = np.repeat(base, self.groups // base.shape[1], axis=1)
        return np.multiply(repeated, self.steps.astype(np.float32))


class Codes(NamedTuple):
    """Some outputs of a weight: scales * (code - zeros) + minimums, with table[code] in place of a code if there is a
    table."""

    codes: NDArray[np.uint8]  # [outputs, inputs], one in each byte, below 2 ** bits
    bits: int
    scales: Grouped
    zeros: int | NDArray[np.uint8]  # one for all, or [outputs, groups]
    minimums: Grouped | None = None
    table: NDArray[Any] | None = None  # int8 or uint8 [up to 256]; float32: E4M3, or sixteen values of 4 bits
    order: NDArray[np.int32] | None = None  # [inputs]: the input of each column; None: they are in order

    @property
    def weight(self) -> NDArray[np.float32]:
        """Return the dequantised weight, float32 [outputs, inputs]: exact, but for the rounding to float32."""
        numbers = (self.codes if self.table is None else self.table[self.codes]).astype(np.float32, order="C")
        if isinstance(self.zeros, int):
            numbers -= self.zeros
        else:
            _apply(np.subtract, numbers, self.zeros)
        _apply(np.multiply, numbers, self.scales.values)
        if self.minimums is not None:
            _apply(np.add, numbers, self.minimums.values)
        return numbers if self.order is None else numbers[:, np.argsort(self.order)]


def _apply(operation: np.ufunc, numbers: NDArray[np.float32], groups: NDArray[Any]) -> None:
    """Combine numbers [outputs, inputs] in place with those of their groups, [outputs, groups]."""
    by_group = numbers.reshape(*groups.shape, -1)
    operation(by_group, groups[..., None], out=by_group)
