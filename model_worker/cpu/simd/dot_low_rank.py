"""The two innermost loops of a low-rank product x A' B': rows by sixteen ranks of A, and their ranks by a panel of B.

A lies in blocks of sixteen ranks: their scales, their offsets, then words [step, LANES] like those of packed weights.
The product with A ends as float32, times the scales, plus the offsets. B lies in panels of 64 outputs like packed
weights, with the ranks in place of inputs; its products are added to a tile.

Every row is summed in one order, however many rows go through a loop together. Knows LLVM and these two layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba.extending
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types

from model_worker.cpu.simd.dot_bf16 import (
    FLOATS,
    INDEX,
    LANES,
    PIECE_ROWS,
    TILE_ROWS,
    WORD,
    Operand,
    emit_products,
    float_by_float,
    float_by_pairs,
    load_words,
    register_groups,
    splat,
    sums_at,
)

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic

# Ranks in a block of A.
RANKS = LANES
# Bytes of a block before its words: a float32 scale and offset for each rank.
HEADER_BYTES = 2 * RANKS * 4
# Sums of each row, which take the steps in turn, so that one row need not wait for each of its own products.
_TURNS = 4
# Rows that go through a block of A together: their sums fill the registers.
_ROWS_OF_A = 4 if PIECE_ROWS == TILE_ROWS else 1
# Rows that go through a panel of B together.
_ROWS_OF_B = 3


def _repeat(builder: Any, count: Any, start: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Emit a loop of `count` turns, which may be none. `body(turn, values)` gives the values of the next one."""
    entry = builder.block
    head, inside, done = (builder.append_basic_block(name) for name in ("head", "turn", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    turn, *values = [builder.phi(value.type) for value in (count, *start)]
    for phi, first in zip((turn, *values), (ir.Constant(INDEX, 0), *start), strict=True):
        phi.add_incoming(first, entry)
    builder.cbranch(builder.icmp_signed("<", turn, count), inside, done)
    builder.position_at_end(inside)
    following = [builder.add(turn, ir.Constant(INDEX, 1)), *body(turn, values)]
    for phi, value in zip((turn, *values), following, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(done)
    return values


def _down(rows: int) -> Any:
    """Make an intrinsic `down(inputs, like, first_row, block, ranks, column)`.

    ranks[first_row + r, column : column + RANKS] = inputs[first_row + r] . block of A, at the address `block`.
    """

    @intrinsic
    def down(typing: Any, inputs: Any, like: Any, first_row: Any, block: Any, ranks: Any, column: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            operand = Operand(context, builder, signature.args[0], args[0], args[2], signature.args[1])
            address = builder.inttoptr(args[3], WORD.as_pointer())
            words = builder.gep(address, [ir.Constant(INDEX, HEADER_BYTES // 4)])
            whole = builder.sdiv(operand.steps, ir.Constant(INDEX, _TURNS))
            zero = ir.Constant(FLOATS, [0.0] * LANES)

            def multiplied(step: Any, sums: list[Any]) -> list[Any]:
                """Add the products of a step with one sum of each row."""
                place = builder.gep(words, [builder.mul(step, ir.Constant(INDEX, LANES))])
                (weights,) = load_words(builder, [place])
                for row in range(rows):
                    for part in range(operand.parts):
                        at = builder.add(builder.mul(step, ir.Constant(INDEX, operand.parts)), ir.Constant(INDEX, part))
                        at = builder.add(at, builder.mul(operand.stride, ir.Constant(INDEX, row)))
                        x = splat(builder, builder.load(builder.gep(operand.words, [at]), align=4))
                        sums[row] = operand.step(builder, sums[row], x, weights, part)
                return sums

            def turn(number: Any, values: list[Any]) -> list[Any]:
                values = list(values)
                for i in range(_TURNS):
                    step = builder.add(builder.mul(number, ir.Constant(INDEX, _TURNS)), ir.Constant(INDEX, i))
                    values[i::_TURNS] = multiplied(step, values[i::_TURNS])
                return values

            def rest(number: Any, values: list[Any]) -> list[Any]:
                step = builder.add(builder.mul(whole, ir.Constant(INDEX, _TURNS)), number)
                values = list(values)
                values[::_TURNS] = multiplied(step, values[::_TURNS])
                return values

            sums = _repeat(builder, whole, [zero] * (rows * _TURNS), turn)
            left = builder.srem(operand.steps, ir.Constant(INDEX, _TURNS))
            sums = _repeat(builder, left, sums, rest)
            scales, offsets = (
                builder.bitcast(bits, FLOATS)
                for bits in load_words(builder, [address, builder.gep(address, [ir.Constant(INDEX, RANKS)])])
            )
            places = sums_at(context, builder, signature.args[4], args[4], args[2], args[5], rows, 1)
            for row, place in enumerate(places):
                a, b, c, d = sums[row * _TURNS : (row + 1) * _TURNS]
                total = builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
                builder.store(builder.fadd(builder.fmul(total, scales), offsets), place, align=4)
            return context.get_dummy_value()

        return types.void(inputs, like, types.int64, types.int64, ranks, types.int64), codegen

    return down


def _up(rows: int, vectors: int) -> Any:
    """Make an intrinsic `up(ranks, like, row, column, steps, panel, tile, tile_row)`.

    tile[tile_row + r, lane] += ranks[row + r, from column on] . panel of B, at the address `panel`.
    """

    @intrinsic
    def up(
        typing: Any,
        ranks: Any,
        like: Any,
        row: Any,
        column: Any,
        steps: Any,
        panel: Any,
        tile: Any,
        tile_row: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, args[0])
            stride = builder.extract_value(array.shape, 1)
            begin = builder.gep(array.data, [builder.add(builder.mul(args[2], stride), args[3])])
            inputs = builder.bitcast(begin, WORD.as_pointer())
            address = builder.inttoptr(args[5], WORD.as_pointer())
            in_pairs = signature.args[1].dtype == types.uint16
            step = float_by_pairs if in_pairs else float_by_float
            parts = 2 if in_pairs else 1
            places = sums_at(
                context, builder, signature.args[6], args[6], args[7], ir.Constant(INDEX, 0), rows, vectors
            )
            for group in register_groups(rows, vectors):

                def fetch(at: Any, _ahead: Any, group: range = group) -> list[Any]:
                    line = builder.gep(address, [builder.mul(at, ir.Constant(INDEX, 4 * LANES))])
                    return load_words(builder, [builder.gep(line, [ir.Constant(INDEX, v * LANES)]) for v in group])

                chosen = [places[r * vectors + v] for r in range(rows) for v in group]
                start = [builder.load(place, align=4) for place in chosen]
                sums = emit_products(builder, rows, step, inputs, stride, args[4], fetch, start, parts=parts)
                for place, total in zip(chosen, sums, strict=True):
                    builder.store(total, place, align=4)
            return context.get_dummy_value()

        long = types.int64
        return types.void(ranks, like, long, long, long, long, tile, long), codegen

    return up


_down_1, _down_many = _down(1), _down(_ROWS_OF_A)
_wide_1, _wide_3, _half_1, _half_3 = _up(1, 4), _up(_ROWS_OF_B, 4), _up(1, 2), _up(_ROWS_OF_B, 2)


@njit(nogil=True, cache=True)
def multiply_ranks(inputs: Any, like: Any, first_row: int, rows: int, block: int, ranks: Any, column: int) -> None:
    """Compute RANKS columns of `ranks` for some rows: inputs . the block of A at the address `block`.

    `inputs` are C-contiguous, of `operand_dtype`, as wide as the block has steps; the block's words are of the element
    type of `like`.
    """
    row = first_row
    end = first_row + rows
    while row + _ROWS_OF_A <= end:
        _down_many(inputs, like, row, block, ranks, column)
        row += _ROWS_OF_A
    while row < end:
        _down_1(inputs, like, row, block, ranks, column)
        row += 1


@njit(nogil=True, cache=True)
def add_panel(
    ranks: Any, like: Any, row: int, rows: int, column: int, steps: int, panel: int, whole: bool, tile: Any, to: int
) -> None:
    """Add ranks . the panel of B, or half panel, at the address `panel` to `rows` rows of the tile, from row `to` on.

    Its `steps` words are multiplied by the columns of `ranks` from `column` on.
    """
    done = 0
    while done + _ROWS_OF_B <= rows:
        if whole:
            _wide_3(ranks, like, row + done, column, steps, panel, tile, to + done)
        else:
            _half_3(ranks, like, row + done, column, steps, panel, tile, to + done)
        done += _ROWS_OF_B
    while done < rows:
        if whole:
            _wide_1(ranks, like, row + done, column, steps, panel, tile, to + done)
        else:
            _half_1(ranks, like, row + done, column, steps, panel, tile, to + done)
        done += 1
