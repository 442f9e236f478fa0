"""Rows of an operand as fixed-point numbers, as digits that multiply int8 weights without any rounding.

A row's greatest element becomes 2**15 or 2**23, near enough, and each element the nearest whole number. Processors that
multiply bytes in fours (VNNI) take it as signed bytes, with base 256: two for bfloat16, three for float32. Others take
numbers of 16 bits and multiply them in pairs: one for bfloat16, two with base 4096 for float32.

So an element is off by at most a 65,000th of its row's greatest, or a 16-millionth, and a row of n elements by a share
of at most sqrt(n) / 65,000: up to some ten thousand elements no more than bfloat16 took from it already, and for
float32 no more than its sums lose. Weights need not be widened.

An element type of int8 stands for one signed byte, with which a row's greatest element is 127: half the work of two,
and an error that the caller must have judged. Does not know the meaning of operands.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba.extending
import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from model_worker.cpu.simd.dot_bf16 import HAS_BYTE_DOT
from model_worker.cpu.simd.elements import INSIDE, magnitude, number_of, widened

overload: Any = numba.extending.overload

# Inputs of a step: a processor multiplies that many bytes at once.
WORD_BYTES = 4
# Offset of weights, which are stored as unsigned bytes.
OFFSET = 128
# The input of a step for each byte of a word of weights: every other byte makes a pair of 16 bits.
PLACES = [0, 1, 2, 3] if HAS_BYTE_DOT else [0, 2, 1, 3]
# Words of each digit that a step takes.
PARTS = 1 if HAS_BYTE_DOT else 2
_DIGIT = np.int8 if HAS_BYTE_DOT else np.int16
# Digits of an element, by numba's type.
DIGITS: dict[Any, int] = (
    {types.int8: 1, types.uint16: 2, types.float32: 3}
    if HAS_BYTE_DOT
    else {types.int8: 1, types.uint16: 1, types.float32: 2}
)
# Most inputs of a product whose sums of bytes fit into 32 bits. (On their way they may overflow: they come back.)
MOST_INPUTS = 1 << 17
# Inputs of a block, whose sums are whole numbers; those of blocks are added as float32.
BLOCK_INPUTS = MOST_INPUTS if HAS_BYTE_DOT else 512
_SHIFT = 8 if HAS_BYTE_DOT else 12
BASE = 1 << _SHIFT
_HALF = BASE // 2
_COARSE = 127 * BASE + 127 if HAS_BYTE_DOT else (1 << 15) - 1
_COARSEST = 127 if HAS_BYTE_DOT else _COARSE
# A little less than all digits can say: float32 may round the greatest whole number up.
_FINE = (127 << 16) if HAS_BYTE_DOT else 2047 << 12
# The largest error of an element, over its row's greatest. (Of float32 rows far less.)
ROUNDING = 1.01 / (2 * _COARSE)
# Rows without an element as large as this count as zeros: their scales could not be computed.
HARDLY_ANYTHING = np.float32(1e-30)


class Digits(NamedTuple):
    """Buffers for rows of an operand, whose elements are `wholes` times `factors`: a core's own, or with the core
    first."""

    values: NDArray[Any]  # row by row, and digit by digit, the greatest first: as wide as `width_of` says
    starts: NDArray[np.int32]  # [rows * digits * blocks]: what sums begin with, so that the weights' offset cancels out
    factors: NDArray[np.float32]  # [rows]: not a number where an element is not finite


def digits_of(like: Any) -> int:
    """Return the number of digits for an element of a model whose element type is this array's."""
    kinds = {np.dtype(np.int8): types.int8, np.dtype(np.uint16): types.uint16}
    return DIGITS[kinds.get(like.dtype, types.float32)]


@overload(digits_of)
def _digits_of(like: Any) -> Any:
    count = DIGITS[like.dtype]

    def constant(like: Any) -> Any:
        return count

    return constant


def room_for(cores: int, rows: int, elements: int, like: Any) -> Digits:
    """Make buffers for `rows` rows on each core with `elements` elements together, padded; `like` is as
    `digits_of`'s."""
    count = digits_of(like)
    return Digits(
        np.zeros((cores, count * elements), _DIGIT),
        np.zeros((cores, count * (rows + elements // BLOCK_INPUTS)), np.int32),
        np.zeros((cores, rows), np.float32),
    )


@njit(nogil=True, cache=True)
def width_of(inputs: int) -> int:
    """Return the inputs of a row, with padding."""
    return -(-inputs // WORD_BYTES) * WORD_BYTES


@njit(nogil=True, cache=True)
def blocks_of(inputs: int) -> int:
    """Return the blocks of a row with so many inputs."""
    return -(-inputs // BLOCK_INPUTS)


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _in_one(values: Any, inverse: Any, first: Any) -> None:
    for c in range(len(values)):
        first[c] = np.int32(np.rint(widened(values[c]) * inverse))


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _in_two(values: Any, inverse: Any, first: Any, second: Any) -> None:
    for c in range(len(values)):
        whole = np.int32(np.rint(widened(values[c]) * inverse))
        low = np.int32(((whole + _HALF) & (BASE - 1)) - _HALF)
        first[c] = np.int32((whole - low) >> _SHIFT)
        second[c] = low


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _in_three(values: Any, inverse: Any, first: Any, second: Any, third: Any) -> None:
    for c in range(len(values)):
        whole = np.int32(np.rint(widened(values[c]) * inverse))
        low = np.int32(((whole + _HALF) & (BASE - 1)) - _HALF)
        rest = np.int32((whole - low) >> _SHIFT)
        middle = np.int32(((rest + _HALF) & (BASE - 1)) - _HALF)
        first[c] = np.int32((rest - middle) >> _SHIFT)
        second[c] = middle
        third[c] = low


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _set_starts(values: Any, starts: Any) -> None:
    """Set the starts of one digit of a row."""
    for block in range(len(starts)):
        total = np.int32(0)
        for value in values[block * BLOCK_INPUTS : (block + 1) * BLOCK_INPUTS]:
            total = np.int32(total + value)
        starts[block] = -OFFSET * total


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def split(operand: Any, like: Any, digits: Any) -> None:
    """Split the rows of an operand into digits."""
    for row in range(len(operand)):
        split_row(row, operand[row], like, digits)


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def split_row(row: int, values: Any, like: Any, digits: Any) -> None:
    """Split the values of row number `row` into digits."""
    count = digits_of(like)
    inputs = len(values)
    width = width_of(inputs)
    blocks = blocks_of(inputs)
    wholes = np.float32(_COARSEST if like.itemsize == 1 else _COARSE if like.itemsize == 2 else _FINE)
    most = np.int32(0)
    for c in range(inputs):
        most = max(most, magnitude(values[c]))
    peak = number_of(most)
    at = row * count * width
    own = digits.values[at:]
    starts = digits.starts[row * count * blocks : (row + 1) * count * blocks]
    if HARDLY_ANYTHING <= peak < np.float32(np.inf):
        inverse = wholes / peak
        if count == 1:
            _in_one(values, inverse, own[:width])
        elif count == 2:
            _in_two(values, inverse, own[:width], own[width : 2 * width])
        else:
            _in_three(values, inverse, own[:width], own[width : 2 * width], own[2 * width : 3 * width])
        for digit in range(count):
            end = (digit + 1) * width
            own[end - width + inputs : end] = 0
            _set_starts(own[end - width : end], starts[digit * blocks : (digit + 1) * blocks])
        digits.factors[row] = peak / wholes
    else:
        own[: count * width] = 0
        starts[:] = 0
        digits.factors[row] = np.float32(0.0) if peak < HARDLY_ANYTHING else np.float32(np.nan)
