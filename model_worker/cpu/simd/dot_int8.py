"""The innermost loop of a product with int8 weights: a few rows by a panel, or by half of one.

Knows LLVM, digits as fixed_point.py makes them, and panels as int8_linear.py describes them: in the layout of the
others, but a word holds the weights of four inputs, as unsigned bytes with an offset of 128. Sums of a block of inputs
are whole numbers and exact, until they are scaled. Does not know the meaning of operands.
"""

from __future__ import annotations

from typing import Any

import numba.core.cgutils
import numba.extending
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types

from model_worker.cpu.simd.dot_bf16 import (
    FLOATS,
    HAS_BYTE_DOT,
    HAS_SHORT_DOT,
    INDEX,
    LANES,
    PIECE_ROWS,
    PREFETCH,
    STEP_BYTES,
    TILE_ROWS,
    WORD,
    WORDS,
    emit_products,
    fetch_panel,
    prefetching_from,
    prefetching_of,
    register_groups,
    splat,
    sums_at,
)
from model_worker.cpu.simd.fixed_point import BASE, BLOCK_INPUTS, DIGITS, PARTS, WORD_BYTES, digits_of

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic
overload: Any = numba.extending.overload

_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)
_BLOCK_STEPS = BLOCK_INPUTS // WORD_BYTES
_MOST_ROWS = PIECE_ROWS if HAS_BYTE_DOT else 4


def int8_rows(like: Any) -> int:
    """Return the rows of a tile: so many that all sums stay in registers. `like` is as `digits_of` takes it."""
    return min(_MOST_ROWS, PIECE_ROWS // digits_of(like))


@overload(int8_rows)
def _int8_rows(like: Any) -> Any:
    rows = min(_MOST_ROWS, PIECE_ROWS // DIGITS[like.dtype])

    def constant(like: Any) -> Any:
        return rows

    return constant


def _bytes_in_fours(builder: Any, total: Any, x: Any, w: Any, _part: int) -> Any:
    """Add to each word's total the products of its four bytes, of x with a sign and of w without."""
    kind = ir.FunctionType(WORDS, (WORDS, WORDS, WORDS))
    function = builder.module.declare_intrinsic("llvm.x86.avx512.vpdpbusd.512", (), kind)
    return builder.call(function, (total, w, x))


def _shorts_in_pairs(builder: Any, total: Any, x: Any, w: Any, part: int) -> Any:
    """Add to each word's total two products: of x's two numbers of 16 bits with the even bytes of w, then with the
    odd."""
    w = builder.bitcast(w, _SHORTS)
    if part == 0:
        w = builder.and_(w, ir.Constant(_SHORTS, [0xFF] * 2 * LANES))
    else:
        w = builder.lshr(w, ir.Constant(_SHORTS, [8] * 2 * LANES))
    if HAS_SHORT_DOT:
        return builder.add(total, _pairs(builder, builder.bitcast(x, _SHORTS), w))
    w = builder.bitcast(w, WORDS)
    sixteen = ir.Constant(WORDS, [16] * LANES)
    low = builder.mul(
        builder.ashr(builder.shl(x, sixteen), sixteen), builder.and_(w, ir.Constant(WORDS, [255] * LANES))
    )
    high = builder.mul(builder.ashr(x, sixteen), builder.lshr(w, sixteen))
    return builder.add(total, builder.add(low, high))


def _pairs(builder: Any, x: Any, w: Any) -> Any:
    half = ir.VectorType(ir.IntType(16), LANES)
    words = ir.VectorType(WORD, LANES // 2)
    function = builder.module.declare_intrinsic("llvm.x86.avx2.pmadd.wd", (), ir.FunctionType(words, (half, half)))
    sums = []
    for first in (0, LANES):
        mask = ir.Constant(ir.VectorType(WORD, LANES), list(range(first, first + LANES)))
        sums.append(builder.call(function, [builder.shuffle_vector(side, side, mask) for side in (x, w)]))
    return builder.shuffle_vector(*sums, ir.Constant(WORDS, list(range(LANES))))


multiply_step = _bytes_in_fours if HAS_BYTE_DOT else _shorts_in_pairs


def _add_scaled(builder: Any, places: list[Any], sums: list[Any], factor: Any, scales: list[Any]) -> None:
    """Add one row's sums, digit by digit, the greatest first, to the float32 vectors at these places."""
    count = len(sums) // len(places)
    width = len(places)
    for i, place in enumerate(places):
        total = builder.sitofp(sums[i], FLOATS)
        for digit in range(1, count):
            total = builder.fmul(total, ir.Constant(FLOATS, [float(BASE)] * LANES))
            total = builder.fadd(total, builder.sitofp(sums[digit * width + i], FLOATS))
        total = builder.fmul(builder.fmul(total, factor), builder.load(scales[i], align=4))
        builder.store(builder.fadd(builder.load(place, align=4), total), place, align=4)


def _tile(rows: int, vectors: int) -> Any:
    """Make an intrinsic `tile(like, digits, inputs, first_row, panel_address, scales_address, prefetching, out)`.

    out[r, lane] = operand[first_row + r] . panel, as in dot_bf16.py, of an operand with so many inputs, whose rows the
    digits are.
    """

    @intrinsic
    def tile(
        typing: Any,
        like: Any,
        digits: Any,
        inputs: Any,
        first_row: Any,
        panel: Any,
        scales: Any,
        prefetching: Any,
        out: Any,
    ) -> Any:
        count = DIGITS[like.dtype]

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def number(value: int) -> Any:
                return ir.Constant(INDEX, value)

            steps, blocks = (
                builder.udiv(builder.add(args[2], number(unit - 1)), number(unit))
                for unit in (WORD_BYTES, BLOCK_INPUTS)
            )
            values, starts, factors = (
                context.make_array(kind)(context, builder, builder.extract_value(args[1], i)).data
                for i, kind in enumerate(signature.args[1].types)
            )
            first = builder.mul(args[3], number(count))
            stride = builder.mul(steps, number(PARTS))
            words = builder.gep(builder.bitcast(values, WORD.as_pointer()), [builder.mul(first, stride)])
            starts = builder.gep(starts, [builder.mul(first, blocks)])
            factors = builder.gep(factors, [args[3]])
            weights = builder.inttoptr(args[4], WORD.as_pointer())
            scale_place = builder.inttoptr(args[5], FLOATS.as_pointer())
            for turn, group in enumerate(register_groups(rows * count, vectors)):
                width = len(group)
                column = number(group[0] * LANES)
                of_group = [builder.gep(scale_place, [number(v)]) for v in group]
                to = sums_at(context, builder, signature.args[7], args[7], number(0), column, rows, width)
                for place in to:
                    builder.store(ir.Constant(FLOATS, [0.0] * LANES), place, align=4)
                asked = prefetching_of(builder, args[6], turn, steps)
                with numba.core.cgutils.for_range(builder, blocks) as block:
                    begin = builder.mul(block.index, number(_BLOCK_STEPS))
                    rest = builder.sub(steps, begin)
                    many = builder.select(
                        builder.icmp_signed("<", rest, number(_BLOCK_STEPS)), rest, number(_BLOCK_STEPS)
                    )
                    start = []
                    for row in range(rows * count):
                        at = builder.add(builder.mul(number(row), blocks), block.index)
                        start += [splat(builder, builder.load(builder.gep(starts, [at])))] * width
                    x = builder.gep(words, [builder.mul(begin, number(PARTS))])
                    panel = builder.gep(weights, [builder.mul(begin, number(STEP_BYTES // WORD_BYTES))])
                    fetch = fetch_panel(builder, panel, group)
                    prefetching = prefetching_from(builder, asked, begin)
                    totals = emit_products(
                        builder,
                        rows * count,
                        multiply_step,
                        x,
                        stride,
                        many,
                        fetch,
                        start,
                        prefetching,
                        PARTS,
                        by_vector=PARTS > 1,
                    )
                    for row in range(rows):
                        factor = splat(builder, builder.load(builder.gep(factors, [number(row)])))
                        sums = totals[row * count * width : (row + 1) * count * width]
                        _add_scaled(builder, to[row * width : (row + 1) * width], sums, factor, of_group)
            return context.get_dummy_value()

        numbers = (types.int64, types.int64, types.int64, types.int64)
        return types.void(like, digits, *numbers, PREFETCH, out), codegen

    return tile


_wide_1, _wide_2, _wide_3, _wide_4, _wide_5, _wide_6 = (_tile(rows, 4) for rows in range(1, TILE_ROWS + 1))
_half_1, _half_2, _half_3, _half_4, _half_5, _half_6 = (_tile(rows, 2) for rows in range(1, TILE_ROWS + 1))


@njit(nogil=True, cache=True)
def multiply_int8_panel(
    like: Any, digits: Any, inputs: int, first_row: int, rows: int, panel: int, scales: int, prefetching: Any, out: Any
) -> None:
    """Compute out[r, :PANEL] = (operand[first_row + r] . panel) * scales for up to `int8_rows` rows, which `digits`
    hold.

    The operand has `inputs` inputs; `like` is as `digits_of` takes it; `panel` and `scales` are addresses.
    """
    if rows == 1:
        _wide_1(like, digits, inputs, first_row, panel, scales, prefetching, out)
    elif rows == 2 or int8_rows(like) <= 2:
        _wide_2(like, digits, inputs, first_row, panel, scales, prefetching, out)
    elif rows == 3 or int8_rows(like) <= 3:
        _wide_3(like, digits, inputs, first_row, panel, scales, prefetching, out)
    elif rows == 4 or int8_rows(like) <= 4:
        _wide_4(like, digits, inputs, first_row, panel, scales, prefetching, out)
    elif rows == 5:
        _wide_5(like, digits, inputs, first_row, panel, scales, prefetching, out)
    else:
        _wide_6(like, digits, inputs, first_row, panel, scales, prefetching, out)


@njit(nogil=True, cache=True)
def multiply_int8_half_panel(
    like: Any, digits: Any, inputs: int, first_row: int, rows: int, panel: int, scales: int, prefetching: Any, out: Any
) -> None:
    """Compute out[r, : PANEL // 2] for the half panel at the address `panel`, as `multiply_int8_panel`."""
    if rows == 1:
        _half_1(like, digits, inputs, first_row, panel, scales, prefetching, out)
    elif rows == 2 or int8_rows(like) <= 2:
        _half_2(like, digits, inputs, first_row, panel, scales, prefetching, out)
    elif rows == 3 or int8_rows(like) <= 3:
        _half_3(like, digits, inputs, first_row, panel, scales, prefetching, out)
    elif rows == 4 or int8_rows(like) <= 4:
        _half_4(like, digits, inputs, first_row, panel, scales, prefetching, out)
    elif rows == 5:
        _half_5(like, digits, inputs, first_row, panel, scales, prefetching, out)
    else:
        _half_6(like, digits, inputs, first_row, panel, scales, prefetching, out)
