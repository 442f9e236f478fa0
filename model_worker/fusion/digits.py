"""Rows of an operand as fixed-point numbers, in signed bytes that multiply int8 weights without any rounding.

A row's greatest element becomes 2**15 or 2**23, near enough, and each element the nearest whole number, written with
base 256 in two or three digits from -128 to 127: two for bfloat16, three for float32. So an element is off by at most a
65,000th of its row's greatest, or a 16-millionth, and a row of n elements by a share of at most sqrt(n) / 65,000: up to
some ten thousand elements no more than bfloat16 took from it already, and for float32 no more than its sums lose.
Sums of such products are exact until they are scaled. Processors multiply four pairs of bytes where they multiply two
of bfloat16, and weights need not be widened. Does not know what is multiplied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba.extending
import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from model_worker.fusion.elements import INSIDE, magnitude, number_of, widened

overload: Any = numba.extending.overload

WORD_BYTES = 4
"""What a processor multiplies at once: so many inputs make a step."""
OFFSET = 128
"""Weights are kept as bytes without sign, so much too large."""
MOST_INPUTS = 1 << 17
"""Of a product whose sums cannot leave 32 bits. (On their way they may: they come back.)"""
DIGITS = {types.uint16: 2, types.float32: 3}
"""Of an element, by numba's type."""
_BASE, _HALF = 256, 128
_GREATEST = 127 * _BASE + 127  # in two digits
ROUNDING = 1.01 / (2 * _GREATEST)
"""How far an element may be off, over its row's greatest. (Of float32 rows far less.)"""
HARDLY_ANYTHING = np.float32(1e-30)
"""Rows without an element as large as this are taken for zeros: their factors could not be computed."""


class Digits(NamedTuple):
    """Room for rows of an operand, whose elements are wholes times `factors`: a core's own, or with the core first."""

    values: NDArray[np.int8]  # row by row, and digit by digit, the greatest first: as wide as `width_of` says
    starts: NDArray[np.int32]  # [rows * digits]: what sums begin with, so that the weights' offset cancels out
    factors: NDArray[np.float32]  # [rows]: not a number where an element is not finite
    widened: NDArray[np.uint32]  # [2, words]: panels for many rows, as products.py knows them


def digits_of(like: Any) -> int:
    """How many bytes stand for an element of a model whose element type is this array's."""
    return 2 if like.dtype == np.uint16 else 3


@overload(digits_of)
def _digits_of(like: Any) -> Any:
    def two(like: Any) -> Any:
        return 2

    def three(like: Any) -> Any:
        return 3

    return two if DIGITS[like.dtype] == 2 else three


def room_for(cores: int, rows: int, elements: int, like: Any, words: int = 0) -> Digits:
    """For so many rows on each core that have so many elements together, with padding, and for two panels widened.

    `like` is as `digits_of` takes it.
    """
    count = digits_of(like)
    return Digits(
        np.zeros((cores, count * elements), np.int8),
        np.zeros((cores, count * rows), np.int32),
        np.zeros((cores, rows), np.float32),
        np.zeros((cores, 2, words), np.uint32),
    )


@njit(nogil=True, cache=True)
def width_of(inputs: int) -> int:
    """Inputs of a row, with padding."""
    return -(-inputs // WORD_BYTES) * WORD_BYTES


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _split_row(values: Any, inverse: Any, first: Any, second: Any, starts: Any) -> None:
    """In two digits."""
    total = other = np.int32(0)
    for c in range(len(values)):
        whole = np.int32(np.rint(widened(values[c]) * inverse))
        low = np.int32(((whole + _HALF) & (_BASE - 1)) - _HALF)
        high = np.int32((whole - low) >> 8)
        first[c], second[c] = high, low
        total += high
        other += low
    starts[0], starts[1] = -OFFSET * total, -OFFSET * other


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _split_row_finely(values: Any, inverse: Any, first: Any, second: Any, third: Any, starts: Any) -> None:
    """In three digits."""
    total = other = last = np.int32(0)
    for c in range(len(values)):
        whole = np.int32(np.rint(widened(values[c]) * inverse))
        low = np.int32(((whole + _HALF) & (_BASE - 1)) - _HALF)
        rest = np.int32((whole - low) >> 8)
        middle = np.int32(((rest + _HALF) & (_BASE - 1)) - _HALF)
        high = np.int32((rest - middle) >> 8)
        first[c], second[c], third[c] = high, middle, low
        total += high
        other += middle
        last += low
    starts[0], starts[1], starts[2] = -OFFSET * total, -OFFSET * other, -OFFSET * last


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def split(operand: Any, like: Any, digits: Any) -> None:
    """The rows of an operand as Digits."""
    count, inputs, width = digits_of(like), operand.shape[1], width_of(operand.shape[1])
    # A little less than three digits can say: float32 may round the greatest whole number up.
    wholes = np.float32(_GREATEST if count == 2 else _GREATEST * _BASE)
    for row in range(len(operand)):
        values, most = operand[row], np.int32(0)
        for c in range(inputs):
            most = max(most, magnitude(values[c]))
        peak, at = number_of(most), row * count * width
        if HARDLY_ANYTHING <= peak < np.float32(np.inf):
            inverse, starts = wholes / peak, digits.starts[row * count : (row + 1) * count]
            first = digits.values[at : at + width]
            second = digits.values[at + width : at + 2 * width]
            if count == 2:
                _split_row(values, inverse, first, second, starts)
            else:
                third = digits.values[at + 2 * width : at + 3 * width]
                _split_row_finely(values, inverse, first, second, third, starts)
            for digit in range(count):
                end = at + (digit + 1) * width
                for c in range(inputs - width, 0):
                    digits.values[end + c] = 0
            digits.factors[row] = peak / wholes
        else:
            digits.values[at : at + count * width] = 0
            digits.starts[row * count : (row + 1) * count] = 0
            digits.factors[row] = np.float32(0.0) if peak < HARDLY_ANYTHING else np.float32(np.nan)
