"""Panels of int8 weights as panels of float32 or bfloat16, for many rows where nothing multiplies bytes in fours.

A few rows are multiplied by the bytes as they are (int8_tile.py). Where that takes more instructions than bfloat16 or
float32 do, a panel is widened once for many rows, by the core that multiplies it, and scaled in the end. Whole numbers
up to 127 are exact in bfloat16. Knows LLVM, and panels as int8_linear.py and linears.py describe them.
"""

from __future__ import annotations

from typing import Any

import numba.extending
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types

from model_worker.fusion.digits import OFFSET, WORD_BYTES
from model_worker.fusion.elements import INSIDE
from model_worker.fusion.tile import FLOATS, HAS_BYTE_DOT, INDEX, LANES, STEP_BYTES, WORD, WORDS, load_words

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic

WIDENS = not HAS_BYTE_DOT
"""Whether panels are ever widened."""
_MOST_ROWS_IN_BYTES = 4


@njit(nogil=True, cache=True, **INSIDE)
def are_widened(rows: int) -> Any:
    """Whether so many rows are multiplied by panels that were widened."""
    return WIDENS and rows > _MOST_ROWS_IN_BYTES


@intrinsic
def _widen_words(typing: Any, like: Any, words: Any, to: Any) -> Any:
    """Sixteen words at an address: each word's four weights as words of the element type of `like`, a step apart."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (bytes_,) = load_words(builder, [builder.inttoptr(args[1], WORD.as_pointer())])
        numbers = []
        for place in range(WORD_BYTES):
            shift, mask, offset = (ir.Constant(WORDS, [value] * LANES) for value in (8 * place, 0xFF, OFFSET))
            number = builder.sub(builder.and_(builder.lshr(bytes_, shift), mask), offset)
            numbers.append(builder.bitcast(builder.sitofp(number, FLOATS), WORDS))
        if like.dtype == types.uint16:
            sixteen, high = (ir.Constant(WORDS, [value] * LANES) for value in (16, 0xFFFF0000))
            pairs = zip(numbers[::2], numbers[1::2], strict=True)
            numbers = [builder.or_(builder.lshr(low, sixteen), builder.and_(up, high)) for low, up in pairs]
        for step, number in enumerate(numbers):
            place = builder.inttoptr(builder.add(args[2], ir.Constant(INDEX, step * STEP_BYTES)), WORDS.as_pointer())
            builder.store(number, place, align=4)
        return context.get_dummy_value()

    return types.void(like, types.int64, types.int64), codegen


@njit(nogil=True, cache=True, **INSIDE)
def widen(like: Any, panel: int, steps: int, lanes: int, to: int) -> None:
    """The panel, or the part of it that has so many lanes, with so many steps of bytes, from one address to another."""
    further, lane_bytes = WORD_BYTES // (4 // like.itemsize) * STEP_BYTES, 4
    for step in range(steps):
        for lane in range(0, lanes, LANES):
            at = lane * lane_bytes
            _widen_words(like, panel + step * STEP_BYTES + at, to + step * further + at)
