"""The innermost loop of a product with weights in codes of 4, 5, 6 or 8 bits: a few rows by half a panel.

Knows LLVM, digits as fixed_point.py makes them, and groups of codes as code_groups.py describes them, of which half
a panel is a row. Codes become bytes in registers, once for all rows of a tile, a step of four inputs at a time.

A group's sum is a whole number, exact, and each group is scaled alone, in order: so a row's result does not depend on
the other rows. Does not know where scales come from, nor the meaning of operands.
"""

from __future__ import annotations

from typing import Any

import numba.extending
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types

from model_worker.cpu.simd.code_groups import HALF_LANES, HAS_BYTE_TABLES, ByteTable, CodeGroup, every_lane, index
from model_worker.cpu.simd.dot_bf16 import (
    FLOATS,
    INDEX,
    LANES,
    PREFETCH,
    WORD,
    prefetch,
    register_groups,
    splat,
    sums_at,
)
from model_worker.cpu.simd.dot_int8 import multiply_step
from model_worker.cpu.simd.fixed_point import BASE, DIGITS, PARTS, WORD_BYTES

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic

# Inputs of a group, and of half of one, of which digits have sums.
GROUP_INPUTS = 32
SUM_INPUTS = 16
# Rows of the largest tile.
CODED_ROWS = 4
# Codes with a scale for each half of a group.
SHORT_BITS = 6
# Digits of an element: activations keep 16 bits, whatever the model's type.
CODED_DIGITS: int = DIGITS[types.uint16]
# Bytes of a line of memory.
LINE_BYTES = 64

STEPS = 8
VECTORS = HALF_LANES // LANES


def emit_prefetches(builder: Any, asked: Any, at: Any, bits: int, rows: int) -> None:
    """Prefetch what a group's turn is. One row runs at the speed of memory: its lines are always those of a group."""
    ahead, move, switch, jump = (builder.extract_value(asked, i) for i in range(4))
    behind = builder.select(builder.icmp_signed("<", at, switch), index(0), jump)
    address = builder.add(builder.add(ahead, builder.mul(at, move)), behind)
    if rows == 1:
        lines = builder.inttoptr(address, ir.IntType(8).as_pointer())
        for line in range(2 * bits + 1):
            prefetch(builder, builder.gep(lines, [index(line * LINE_BYTES)]))
        return
    entry = builder.block
    body, done = (builder.append_basic_block(name) for name in ("lines", "prefetched"))
    end = builder.add(address, move)
    builder.branch(body)
    builder.position_at_end(body)
    line = builder.phi(INDEX)
    prefetch(builder, builder.inttoptr(line, ir.IntType(8).as_pointer()))
    following = builder.add(line, index(LINE_BYTES))
    line.add_incoming(address, entry)
    line.add_incoming(following, body)
    builder.cbranch(builder.icmp_signed("<", following, end), body, done)
    builder.position_at_end(done)


def _emit_group(
    builder: Any, rows: int, at: Any, groups: list[CodeGroup], inputs: list[Any], starts: list[list[Any]]
) -> list[list[Any]]:
    """Emit the sums of a group, or of both halves of one: for each, those of rows and vectors as whole numbers.

    `inputs` points to the words of each row and digit; `starts` are the words that the sums of each part begin with.
    """
    parts = len(starts)
    sums = []
    for part in range(parts):
        nothing = [every_lane(0)] * len(groups)
        totals = {(row, digit): list(nothing) for row in range(rows) for digit in range(CODED_DIGITS)}
        for row in range(rows):
            totals[row, CODED_DIGITS - 1] = [splat(builder, starts[part][row])] * len(groups)
        for step in range(STEPS * part // parts, STEPS * (part + 1) // parts):
            weights = [group.step(step) for group in groups]
            for place in range(PARTS):
                offset = builder.add(builder.mul(at, index(STEPS * PARTS)), index(step * PARTS + place))
                for row in range(rows):
                    for digit in range(CODED_DIGITS):
                        word = builder.gep(inputs[row * CODED_DIGITS + digit], [offset])
                        x = splat(builder, builder.load(word, align=4))
                        own = totals[row, digit]
                        for v, weight in enumerate(weights):
                            own[v] = multiply_step(builder, own[v], x, weight, place)
        of_part = []
        for row in range(rows):
            for v in range(len(groups)):
                total = totals[row, 0][v]
                for digit in range(1, CODED_DIGITS):
                    total = builder.add(builder.mul(total, every_lane(BASE)), totals[row, digit][v])
                of_part.append(total)
        sums.append(of_part)
    return sums


def multiply_add(builder: Any, a: Any, b: Any, total: Any) -> Any:
    kind = ir.FunctionType(FLOATS, (FLOATS, FLOATS, FLOATS))
    return builder.call(builder.module.declare_intrinsic("llvm.fmuladd.v16f32", (), kind), (a, b, total))


def loop(builder: Any, count: Any, start: list[Any]) -> tuple[Any, list[Any], Any]:
    """Begin a loop. Returns its index, its values, and the function that ends it and returns the last values."""
    entry = builder.block
    head, body, done = (builder.append_basic_block(name) for name in ("head", "body", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    at, *values = [builder.phi(value.type) for value in (index(0), *start)]
    builder.cbranch(builder.icmp_signed("<", at, count), body, done)
    builder.position_at_end(body)

    def end(results: list[Any]) -> list[Any]:
        following = builder.add(at, index(1))
        for phi, first, result in zip((at, *values), (index(0), *start), (following, *results), strict=True):
            phi.add_incoming(first, entry)
            phi.add_incoming(result, builder.block)
        builder.branch(head)
        builder.position_at_end(done)
        return values

    return at, values, end


def _array(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.make_array(kind)(context, builder, value).data


class _Rows:
    """The digits of some rows, and their sums over groups."""

    def __init__(self, context: Any, builder: Any, rows: int, kinds: Any, args: Any) -> None:
        """Take the first four arguments of a tile."""
        self._builder = builder
        width, first_row = args[2:4]
        words = builder.bitcast(_array(context, builder, kinds[0], args[0]), WORD.as_pointer())
        stride = builder.mul(builder.udiv(width, index(WORD_BYTES)), index(PARTS))
        first = builder.mul(first_row, index(CODED_DIGITS))
        numbers = [builder.add(first, index(i)) for i in range(rows * CODED_DIGITS)]
        self.words = [builder.gep(words, [builder.mul(row, stride)]) for row in numbers]
        sums = _array(context, builder, kinds[1], args[1])
        stride = builder.udiv(width, index(SUM_INPUTS))
        numbers = [builder.add(first_row, index(row)) for row in range(rows)]
        self._sums = [builder.gep(sums, [builder.mul(row, stride)]) for row in numbers]

    def sums(self, group: Any, parts: int) -> list[list[Any]]:
        """Return the sums of each row over a group, or over both of its halves: [part][row]."""
        builder = self._builder
        pair = builder.mul(group, index(2))
        halves = [
            [builder.load(builder.gep(place, [builder.add(pair, index(half))]), align=4) for place in self._sums]
            for half in range(2)
        ]
        return halves if parts == 2 else [[builder.add(*both) for both in zip(*halves, strict=True)]]


def load_floats(builder: Any, address: Any, row: Any, vectors: range) -> list[Any]:
    """Load these vectors of a row of float32 [.., outputs of half a panel]."""
    floats = builder.inttoptr(address, ir.FloatType().as_pointer())
    begin = builder.mul(row, index(HALF_LANES))
    places = [builder.gep(floats, [builder.add(begin, index(v * LANES))]) for v in vectors]
    return [builder.load(builder.bitcast(place, FLOATS.as_pointer()), align=4) for place in places]


def _emit_groups(
    builder: Any, bits: int, of_rows: _Rows, vectors: range, args: Any, prefetching: Any | None, table: ByteTable | None
) -> list[Any]:
    """Emit the loop over groups for these vectors. Returns the sums, row by row."""
    zero, codes, scales, groups = args
    rows = len(of_rows.words) // CODED_DIGITS
    parts = 2 if bits == SHORT_BITS else 1
    negative = builder.sub(ir.Constant(WORD, 0), builder.trunc(zero, WORD))
    weights = builder.inttoptr(codes, WORD.as_pointer())
    at, totals, end = loop(builder, groups, [ir.Constant(FLOATS, [0.0] * LANES)] * (rows * len(vectors)))
    if prefetching is not None:
        emit_prefetches(builder, prefetching, at, bits, rows)
    starts = [[builder.mul(negative, total) for total in part] for part in of_rows.sums(at, parts)]
    begin = builder.mul(at, index(bits * HALF_LANES))
    places = [builder.gep(weights, [builder.add(begin, index(v * LANES))]) for v in vectors]
    codes_of = [CodeGroup(builder, bits, place, table) for place in places]
    for part, sums in enumerate(_emit_group(builder, rows, at, codes_of, of_rows.words, starts)):
        row = builder.add(builder.mul(at, index(parts)), index(part))
        scale = load_floats(builder, scales, row, vectors)
        totals = [
            multiply_add(builder, builder.sitofp(sums[i], FLOATS), scale[i % len(vectors)], total)
            for i, total in enumerate(totals)
        ]
    results: list[Any] = end(totals)
    return results


def _tile(bits: int, rows: int, has_table: bool = False) -> Any:
    """Make an intrinsic: its arguments are those of `multiply_codes`, with the arrays of digits.

    out[r, column + lane] = digits of row first_row + r . half a panel, in units of the row's factor. `values` and
    `sums` are those of rows of `width` inputs; `codes` and `scales` are addresses, the latter of float32 [groups,
    outputs], or [groups, 2, outputs] for SHORT_BITS; `zero` is subtracted from each code. With a table codes are places
    of the bytes at the address `table`.
    """

    @intrinsic
    def tile(
        typing: Any,
        values: Any,
        sums: Any,
        width: Any,
        first_row: Any,
        zero: Any,
        codes: Any,
        scales: Any,
        groups: Any,
        table: Any,
        prefetching: Any,
        out: Any,
        column: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            of_table = ByteTable(builder, args[8]) if has_table else None
            of_rows = _Rows(context, builder, rows, signature.args, args)
            for turn, vectors in enumerate(register_groups(rows, VECTORS)):
                asked = args[9] if turn == 0 else None
                totals = _emit_groups(builder, bits, of_rows, vectors, args[4:8], asked, of_table)
                begin = builder.add(args[11], index(vectors[0] * LANES))
                places = sums_at(context, builder, signature.args[10], args[10], index(0), begin, rows, len(vectors))
                for place, total in zip(places, totals, strict=True):
                    builder.store(total, place, align=4)
            return context.get_dummy_value()

        numbers = (types.int64,) * 7
        return types.void(values, sums, *numbers, PREFETCH, out, types.int64), codegen

    return tile


def _finish(rows: int) -> Any:
    """Make an intrinsic `finish(sums, factors, width, first_row, minimums, units, unit_sums, out, column)`.

    out[r, column + lane] = (out[r, column + lane] + sums of the row . minimums) * factor of the row. `minimums` is the
    address of float32 [units, outputs]; a unit has `unit_sums` sums of each row, one or two. There may be no units.
    """

    @intrinsic
    def finish(
        typing: Any,
        sums: Any,
        factors: Any,
        width: Any,
        first_row: Any,
        minimums: Any,
        units: Any,
        unit_sums: Any,
        out: Any,
        column: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            every, shares = (_array(context, builder, signature.args[i], args[i]) for i in range(2))
            numbers = [builder.add(args[3], index(row)) for row in range(rows)]
            stride = builder.udiv(args[2], index(SUM_INPUTS))
            of_rows = [builder.gep(every, [builder.mul(row, stride)]) for row in numbers]
            places = sums_at(context, builder, signature.args[7], args[7], index(0), args[8], rows, VECTORS)
            in_pairs = builder.icmp_signed("==", args[6], index(2))
            totals = [builder.load(place, align=4) for place in places]
            at, totals, end = loop(builder, args[5], totals)
            least = load_floats(builder, args[4], at, range(VECTORS))
            first = builder.mul(at, args[6])
            last = builder.sub(builder.add(first, args[6]), index(1))
            results = []
            for row, place in enumerate(of_rows):
                whole = builder.load(builder.gep(place, [first]), align=4)
                other = builder.load(builder.gep(place, [last]), align=4)
                whole = builder.select(in_pairs, builder.add(whole, other), whole)
                share = splat(builder, builder.sitofp(whole, ir.FloatType()))
                own = totals[row * VECTORS : (row + 1) * VECTORS]
                results += [multiply_add(builder, share, *both) for both in zip(least, own, strict=True)]
            results = end(results)
            for row, place in enumerate(numbers):
                share = splat(builder, builder.load(builder.gep(shares, [place]), align=4))
                for v in range(row * VECTORS, (row + 1) * VECTORS):
                    builder.store(builder.fmul(results[v], share), places[v], align=4)
            return context.get_dummy_value()

        numbers = (types.int64,) * 5
        return types.void(sums, factors, *numbers, out, types.int64), codegen

    return finish


_4_1, _4_2, _4_4 = (_tile(4, rows) for rows in (1, 2, CODED_ROWS))
_table_1, _table_2, _table_4 = (_tile(4, rows, HAS_BYTE_TABLES) for rows in (1, 2, CODED_ROWS))
_5_1, _5_2, _5_4 = (_tile(5, rows) for rows in (1, 2, CODED_ROWS))
_6_1, _6_2, _6_4 = (_tile(6, rows) for rows in (1, 2, CODED_ROWS))
_8_1, _8_2, _8_4 = (_tile(8, rows) for rows in (1, 2, CODED_ROWS))
_finish_1, _finish_2, _finish_4 = (_finish(rows) for rows in (1, 2, CODED_ROWS))


@njit(nogil=True, cache=True)
def multiply_codes(
    bits: int,
    digits: Any,
    width: int,
    first: int,
    rows: int,
    zero: int,
    codes: int,
    scales: int,
    groups: int,
    table: int,
    prefetching: Any,
    out: Any,
    column: int,
) -> None:
    """Compute out[:, column + lane] = digits of 1, 2 or CODED_ROWS rows . half a panel, in units of rows' factors.

    `table` is the address of the values of codes, or 0 if these are numbers.
    """
    values = digits.values
    sums = digits.sums
    if table:
        if rows == 1:
            _table_1(values, sums, width, first, zero, codes, scales, groups, table, prefetching, out, column)
        elif rows == 2:
            _table_2(values, sums, width, first, zero, codes, scales, groups, table, prefetching, out, column)
        else:
            _table_4(values, sums, width, first, zero, codes, scales, groups, table, prefetching, out, column)
    elif bits == 4:
        if rows == 1:
            _4_1(values, sums, width, first, zero, codes, scales, groups, table, prefetching, out, column)
        elif rows == 2:
            _4_2(values, sums, width, first, zero, codes, scales, groups, table, prefetching, out, column)
        else:
            _4_4(values, sums, width, first, zero, codes, scales, groups, table, prefetching, out, column)
    elif bits == 5:
        if rows == 1:
            _5_1(values, sums, width, first, zero, codes, scales, groups, table, prefetching, out, column)
        elif rows == 2:
            _5_2(values, sums, width, first, zero, codes, scales, groups, table, prefetching, out, column)
        else:
            _5_4(values, sums, width, first, zero, codes, scales, groups, table, prefetching, out, column)
    elif bits == 6:
        if rows == 1:
            _6_1(values, sums, width, first, zero, codes, scales, groups, table, prefetching, out, column)
        elif rows == 2:
            _6_2(values, sums, width, first, zero, codes, scales, groups, table, prefetching, out, column)
        else:
            _6_4(values, sums, width, first, zero, codes, scales, groups, table, prefetching, out, column)
    elif rows == 1:
        _8_1(values, sums, width, first, zero, codes, scales, groups, table, prefetching, out, column)
    elif rows == 2:
        _8_2(values, sums, width, first, zero, codes, scales, groups, table, prefetching, out, column)
    else:
        _8_4(values, sums, width, first, zero, codes, scales, groups, table, prefetching, out, column)


@njit(nogil=True, cache=True)
def finish_codes(
    digits: Any, width: int, first: int, rows: int, minimums: int, units: int, unit_sums: int, out: Any, column: int
) -> None:
    """Add minimums to what `multiply_codes` has computed, and multiply by the rows' factors: see `_finish`."""
    sums = digits.sums
    factors = digits.factors
    if rows == 1:
        _finish_1(sums, factors, width, first, minimums, units, unit_sums, out, column)
    elif rows == 2:
        _finish_2(sums, factors, width, first, minimums, units, unit_sums, out, column)
    else:
        _finish_4(sums, factors, width, first, minimums, units, unit_sums, out, column)
