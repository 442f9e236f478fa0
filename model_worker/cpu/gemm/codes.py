"""A part of a weight in codes of a few bits, in the one form to which readers of checkpoints bring every layout.

A reader gives some outputs at a time (64 and more), so that no weight exists dequantised:

    codes = Codes(codes=nibbles, bits=4, scales=Grouped(d), zeros=8)                                     # Q4_0
    codes = Codes(codes=nibbles, bits=4, scales=Grouped(d, sc), zeros=0, minimums=Grouped(-dmin, mn))    # Q4_K
    codes = Codes(codes=nibbles, bits=4, scales=Grouped(scales), zeros=zero_points)                      # GPTQ, AWQ

Knows numbers. Does not know files, nor how codes lie in memory when they are multiplied (coded_linear.py does).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Bits of codes that panels hold as they are. A code of fewer bits is held in the next larger ones.
BITS = (4, 5, 6, 8)
# Inputs of a group that panels scale at once. Larger groups repeat their scale, shorter ones must be half of it.
GROUP_INPUTS = 32


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
    table: NDArray[np.int8] | None = None

    @property
    def weight(self) -> NDArray[np.float32]:
        """Return the dequantised weight, float32 [outputs, inputs]: exact, but for the rounding to float32."""
        inputs = self.codes.shape[1]
        values = self.codes.astype(np.int32) if self.table is None else self.table[self.codes].astype(np.int32)
        zeros = self.zeros if isinstance(self.zeros, int) else _spread(self.zeros, inputs).astype(np.int32)
        weight: NDArray[np.float32] = (values - zeros).astype(np.float32) * _spread(self.scales.values, inputs)
        return weight if self.minimums is None else weight + _spread(self.minimums.values, inputs)


def _spread(numbers: NDArray[Any], inputs: int) -> NDArray[Any]:
    """Repeat numbers of groups, [outputs, groups], for each of so many inputs."""
    return np.repeat(numbers, inputs // numbers.shape[1], axis=1)
