"""Triton functions of sums with weights in codes, which become numbers in registers, as they are multiplied.

Inputs are taken in steps (grouped_linear.py), of whose bytes both halves are multiplied, so that no code has to move.
Knows elements only.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit
def in_table(codes, TABLE: tl.constexpr):
    """Return the numbers of codes of four bits, i8. Byte i of TABLE is that of code i."""
    places = codes.to(tl.int32)
    in_second = (places & 4) != 0
    lower = tl.where(in_second, (TABLE >> 32) & 0xFFFFFFFF, TABLE & 0xFFFFFFFF)
    upper = tl.where(in_second, (TABLE >> 96) & 0xFFFFFFFF, (TABLE >> 64) & 0xFFFFFFFF)
    word = tl.where((places & 8) != 0, upper, lower)
    return (word >> ((places & 3) * 8)).to(tl.int8)


@_jit
def sum_of_steps(
    from_x,
    has_row,
    from_codes,
    from_scales,
    from_zeros,
    from_order,
    has_column,
    first,
    last,
    ORDERED: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    MIDDLE: tl.constexpr,
    TABLE: tl.constexpr,
    STEP: tl.constexpr,
    PER_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply a tile of outputs by one of tokens over these steps. The pointers are where each of them begins.

    Scales are numbers, or bytes: exponents of two with 127 added. If ORDERED, inputs are taken in an order.
    """
    half = tl.arange(0, STEP // 2)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in range(first, last):
        first_half = step * STEP + half
        second_half = first_half + STEP // 2
        if ORDERED:
            first_half = tl.load(from_order + first_half)
            second_half = tl.load(from_order + second_half)
        x_low = tl.load(from_x[None, :] + first_half[:, None], mask=has_row[None, :], other=0.0)
        x_high = tl.load(from_x[None, :] + second_half[:, None], mask=has_row[None, :], other=0.0)
        group = step // PER_GROUP
        scale = tl.load(from_scales + group, mask=has_column, other=0)
        if scale.dtype == tl.uint8:
            scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        else:
            scale = scale.to(tl.float32)
        codes = from_codes[:, None] + (step * (STEP * BITS // 8) + half)[None, :]
        low = tl.load(codes, mask=has_column[:, None], other=0)
        if BITS == 8:
            # With a zero they are numbers of nine bits.
            high = tl.load(codes + STEP // 2, mask=has_column[:, None], other=0).to(tl.int16)
            low = low.to(tl.int16)
        elif KIND == 3:
            high = in_table(low >> 4, TABLE)
            low = in_table(low & 15, TABLE)
        else:
            high = (low >> 4).to(tl.int8)
            low = (low & 15).to(tl.int8)
        if KIND == 0:
            low -= MIDDLE
            high -= MIDDLE
        if KIND == 1:
            zero = tl.load(from_zeros + group, mask=has_column, other=0)
            low -= zero[:, None]
            high -= zero[:, None]
        sums = tl.dot(low.to(x_low.dtype), x_low, input_precision="ieee")
        sums = tl.dot(high.to(x_low.dtype), x_high, sums, input_precision="ieee")
        total += sums * scale[:, None]
        if KIND == 2:
            offset = tl.load(from_zeros + group, mask=has_column, other=0.0).to(tl.float32)
            of_row = tl.sum(x_low.to(tl.float32), 0) + tl.sum(x_high.to(tl.float32), 0)
            total += offset[:, None] * of_row[None, :]
    return total
