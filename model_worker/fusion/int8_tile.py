"""The innermost loop of a product with int8 weights: a few rows by a panel, or by half of one.

Knows LLVM, digits as digits.py makes them, and panels as int8_linear.py describes them: of the same form as others, but
a word holds the weights of four inputs, as bytes without sign, 128 too large. Sums are whole numbers and exact, until
they are scaled in the end. Does not know what is multiplied.
"""

from __future__ import annotations

from typing import Any

import numba.extending
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types

from model_worker.fusion.digits import DIGITS, WORD_BYTES, digits_of
from model_worker.fusion.tile import (
    EARLY,
    FLOATS,
    HAS_BYTE_DOT,
    HAS_SHORT_DOT,
    INDEX,
    LANES,
    PIECE_ROWS,
    WORD,
    WORDS,
    early_of,
    emit_products,
    fetch_panel,
    register_groups,
    splat,
    store_sums,
)

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic
overload: Any = numba.extending.overload

_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)


def int8_rows(like: Any) -> int:
    """Rows of a tile: so many that all sums stay in registers. `like` is as `digits_of` takes it."""
    return PIECE_ROWS // digits_of(like)


@overload(int8_rows)
def _int8_rows(like: Any) -> Any:
    rows = PIECE_ROWS // DIGITS[like.dtype]

    def constant(like: Any) -> Any:
        return rows

    return constant


def _step(builder: Any, total: Any, x: Any, w: Any, _part: int) -> Any:
    """Each word's total and the products of its four bytes, of x with a sign and of w without."""
    if HAS_BYTE_DOT:
        kind = ir.FunctionType(WORDS, (WORDS, WORDS, WORDS))
        function = builder.module.declare_intrinsic("llvm.x86.avx512.vpdpbusd.512", (), kind)
        return builder.call(function, (total, w, x))
    if HAS_SHORT_DOT:
        return builder.add(total, _in_shorts(builder, x, w))
    for place in range(WORD_BYTES):
        left, right, byte = (ir.Constant(WORDS, [bits] * LANES) for bits in (24 - 8 * place, 8 * place, 0xFF))
        digit = builder.ashr(builder.shl(x, left), ir.Constant(WORDS, [24] * LANES))
        total = builder.add(total, builder.mul(digit, builder.and_(builder.lshr(w, right), byte)))
    return total


def _in_shorts(builder: Any, x: Any, w: Any) -> Any:
    """Each word's sum of products: of the even bytes, and of the odd ones, as numbers of 16 bits."""
    x, w = builder.bitcast(x, _SHORTS), builder.bitcast(w, _SHORTS)
    eight, byte = ir.Constant(_SHORTS, [8] * 2 * LANES), ir.Constant(_SHORTS, [0xFF] * 2 * LANES)
    even = builder.ashr(builder.shl(x, eight), eight), builder.and_(w, byte)
    odd = builder.ashr(x, eight), builder.lshr(w, eight)
    half, words = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(WORD, LANES // 2)
    function = builder.module.declare_intrinsic("llvm.x86.avx2.pmadd.wd", (), ir.FunctionType(words, (half, half)))
    sums = []
    for first in (0, LANES):
        mask = ir.Constant(ir.VectorType(WORD, LANES), list(range(first, first + LANES)))
        parts = [[builder.shuffle_vector(side, side, mask) for side in pair] for pair in (even, odd)]
        sums.append(builder.add(*(builder.call(function, part) for part in parts)))
    return builder.shuffle_vector(*sums, ir.Constant(WORDS, list(range(LANES))))


def _scaled(builder: Any, sums: list[Any], factor: Any, scales: Any) -> Any:
    """The sums of one row's digits, the greatest first, as one vector of float32."""
    total = builder.sitofp(sums[0], FLOATS)
    for digit in sums[1:]:
        total = builder.fmul(total, ir.Constant(FLOATS, [256.0] * LANES))
        total = builder.fadd(total, builder.sitofp(digit, FLOATS))
    return builder.fmul(builder.fmul(total, factor), scales)


def _tile(rows: int, vectors: int) -> Any:
    """An intrinsic `tile(like, digits, inputs, first_row, panel_address, scales_address, early, out)`: out[r, lane] =
    operand[first_row + r] . panel, as in tile.py, of an operand with so many inputs, whose rows the digits are.
    """

    @intrinsic
    def tile(
        typing: Any, like: Any, digits: Any, inputs: Any, first_row: Any, panel: Any, scales: Any, early: Any, out: Any
    ) -> Any:
        count = DIGITS[like.dtype]

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            up, word = ir.Constant(INDEX, WORD_BYTES - 1), ir.Constant(INDEX, WORD_BYTES)
            steps = builder.udiv(builder.add(args[2], up), word)
            values, starts, factors = (
                context.make_array(kind)(context, builder, builder.extract_value(args[1], i)).data
                for i, kind in enumerate(signature.args[1].types[:3])
            )
            first = builder.mul(args[3], ir.Constant(INDEX, count))
            words = builder.gep(builder.bitcast(values, WORD.as_pointer()), [builder.mul(first, steps)])
            address = builder.inttoptr(args[4], WORD.as_pointer())
            scale_place = builder.inttoptr(args[5], FLOATS.as_pointer())
            for number, group in enumerate(register_groups(rows * count, vectors)):
                start, sums, width = [], [], len(group)
                for row in range(rows * count):
                    place = builder.gep(starts, [builder.add(first, ir.Constant(INDEX, row))])
                    start += [splat(builder, builder.load(place))] * width
                fetch, early = fetch_panel(builder, address, group), early_of(builder, args[6], number, steps)
                totals = emit_products(builder, rows * count, _step, words, steps, steps, fetch, start, early)
                for row in range(rows):
                    at = builder.gep(factors, [builder.add(args[3], ir.Constant(INDEX, row))])
                    factor, of_row = splat(builder, builder.load(at)), totals[row * count * width :]
                    for i, v in enumerate(group):
                        scales = builder.load(builder.gep(scale_place, [ir.Constant(INDEX, v)]), align=4)
                        sums.append(_scaled(builder, of_row[i : count * width : width], factor, scales))
                store_sums(context, builder, signature.args[7], args[7], ir.Constant(INDEX, 0), group[0], rows, sums)
            return context.get_dummy_value()

        numbers = (types.int64, types.int64, types.int64, types.int64)
        return types.void(like, digits, *numbers, EARLY, out), codegen

    return tile


_wide_1, _wide_2, _wide_3 = (_tile(rows, 4) for rows in range(1, 4))
_half_1, _half_2, _half_3 = (_tile(rows, 2) for rows in range(1, 4))


@njit(nogil=True, cache=True)
def multiply_int8_panel(
    like: Any, digits: Any, inputs: int, first_row: int, rows: int, panel: int, scales: int, early: Any, out: Any
) -> None:
    """out[r, :PANEL] = (operand[first_row + r] . panel) * scales for up to `int8_rows` rows, which `digits` hold.

    The operand has so many inputs; `like` is as `digits_of` takes it; `panel` and `scales` are addresses.
    """
    if rows == 1:
        _wide_1(like, digits, inputs, first_row, panel, scales, early, out)
    elif rows == 2 or int8_rows(like) <= 2:
        _wide_2(like, digits, inputs, first_row, panel, scales, early, out)
    else:
        _wide_3(like, digits, inputs, first_row, panel, scales, early, out)


@njit(nogil=True, cache=True)
def multiply_int8_half_panel(
    like: Any, digits: Any, inputs: int, first_row: int, rows: int, panel: int, scales: int, early: Any, out: Any
) -> None:
    """The same for the half of a panel that begins at the address `panel`: out[r, : PANEL // 2]."""
    if rows == 1:
        _half_1(like, digits, inputs, first_row, panel, scales, early, out)
    elif rows == 2 or int8_rows(like) <= 2:
        _half_2(like, digits, inputs, first_row, panel, scales, early, out)
    else:
        _half_3(like, digits, inputs, first_row, panel, scales, early, out)
