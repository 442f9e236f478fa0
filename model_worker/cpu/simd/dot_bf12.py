"""The innermost loop of a product with weights in bf12: a few rows by a panel, or by half of one.

Knows LLVM and panels as bf12.py describes them. Weights become bfloat16 in registers, once for all rows of a tile, and
are multiplied in the order of dot_bf16.py, whose every bit this gives. At one row, from a cache, it takes a third
longer, and it reads a quarter less, so it is for few rows, whose weights come from memory.
"""

from __future__ import annotations

from typing import Any

import numba.extending
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types

from model_worker.cpu.simd.bf12 import (
    BF12_STEP_BYTES,
    GROUP_BYTES,
    HEADER_BYTES,
    LOWER_BYTES,
    NUMBERS_ADDRESS,
    UPPER_BYTES,
    WORDS_ADDRESS,
)
from model_worker.cpu.simd.dot_bf16 import (
    FLOATS,
    INDEX,
    LANES,
    PREFETCH,
    STEP_BYTES,
    TILE_ROWS,
    WORD,
    WORDS,
    Operand,
    prefetch,
    splat,
    store_sums,
)

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic

_BYTE = ir.IntType(8)
_BYTES = ir.VectorType(_BYTE, GROUP_BYTES)
_SHORTS = ir.VectorType(ir.IntType(16), GROUP_BYTES // 2)
_LINE_BYTES = 64
_CODE_BITS = 4
_GROUP_VECTORS = 2
_TABLE = 16
# Distance, in exceptions, at which their words are prefetched: they come every few hundred nanoseconds.
_PREFETCHED_EXCEPTIONS = 2


def _number(value: int) -> Any:
    return ir.Constant(INDEX, value)


def _table(builder: Any, panel: Any, offset: int) -> Any:
    """Load sixteen bytes of a panel's header, four times: a lookup counts only the lowest four bits of a code."""
    place = builder.bitcast(builder.gep(panel, [_number(offset)]), ir.VectorType(_BYTE, _TABLE).as_pointer())
    bytes_of_codes = builder.load(place, align=1)
    mask = ir.Constant(ir.VectorType(WORD, GROUP_BYTES), [i % _TABLE for i in range(GROUP_BYTES)])
    return builder.shuffle_vector(bytes_of_codes, ir.Constant(bytes_of_codes.type, ir.Undefined), mask)


def _address(builder: Any, panel: Any, offset: int, kind: Any) -> Any:
    place = builder.bitcast(builder.gep(panel, [_number(offset)]), INDEX.as_pointer())
    return builder.inttoptr(builder.load(place, align=8), kind.as_pointer())


def _look_up(builder: Any, table: Any, codes: Any) -> Any:
    kind = ir.FunctionType(_BYTES, (_BYTES, _BYTES))
    function = builder.module.declare_intrinsic("llvm.x86.avx512.permvar.qi.512", (), kind)
    return builder.call(function, (table, codes))


def _widen(builder: Any, tables: tuple[Any, Any], signs: Any, codes: Any) -> list[Any]:
    """Widen the signs and mantissas of a group, and its codes in the lower halves of bytes, to two vectors of words."""
    sign, mantissa = (ir.Constant(_BYTES, [value] * GROUP_BYTES) for value in (0x80, 0x7F))
    upper = builder.or_(builder.and_(signs, sign), _look_up(builder, tables[0], codes))
    lower = builder.or_(builder.and_(signs, mantissa), _look_up(builder, tables[1], codes))
    vectors = []
    for begin in (0, 8):
        pairs = [(16 * lane + begin + i, GROUP_BYTES + 16 * lane + begin + i) for lane in range(4) for i in range(8)]
        mask = ir.Constant(ir.VectorType(WORD, GROUP_BYTES), [place for pair in pairs for place in pair])
        vectors.append(builder.bitcast(builder.shuffle_vector(lower, upper, mask), WORDS))
    return vectors


class _Panel:
    """The weights of a panel, or of half of one."""

    def __init__(self, builder: Any, address: Any, half: Any) -> None:
        """Take the panel's address. `half` is which half, or None for both."""
        self._half = half
        panel = builder.inttoptr(address, _BYTE.as_pointer())
        self._tables = _table(builder, panel, UPPER_BYTES), _table(builder, panel, LOWER_BYTES)
        self.numbers = _address(builder, panel, NUMBERS_ADDRESS, WORD)
        self._words = _address(builder, panel, WORDS_ADDRESS, WORD)
        self._steps = builder.gep(panel, [_number(HEADER_BYTES)])
        self.vectors = 2 * _GROUP_VECTORS if half is None else _GROUP_VECTORS

    def step(self, builder: Any, at: Any) -> list[Any]:
        """Return the vectors of a step that is no exception."""
        line = builder.gep(self._steps, [builder.mul(at, _number(BF12_STEP_BYTES))])

        def load(offset: Any) -> Any:
            return builder.load(builder.bitcast(builder.gep(line, [offset]), _BYTES.as_pointer()), align=1)

        codes = load(_number(2 * GROUP_BYTES))
        if self._half is None:
            first = load(_number(0))
            second = load(_number(GROUP_BYTES))
            return [
                *_widen(builder, self._tables, first, codes),
                *_widen(builder, self._tables, second, self._shifted(builder, codes, _number(_CODE_BITS))),
            ]
        signs = load(builder.mul(self._half, _number(GROUP_BYTES)))
        shift = builder.mul(self._half, _number(_CODE_BITS))
        return _widen(builder, self._tables, signs, self._shifted(builder, codes, shift))

    @staticmethod
    def _shifted(builder: Any, codes: Any, by: Any) -> Any:
        count = builder.trunc(by, ir.IntType(16))
        first = builder.insert_element(ir.Constant(_SHORTS, ir.Undefined), count, ir.Constant(WORD, 0))
        mask = ir.Constant(ir.VectorType(WORD, GROUP_BYTES // 2), [0] * (GROUP_BYTES // 2))
        counts = builder.shuffle_vector(first, ir.Constant(_SHORTS, ir.Undefined), mask)
        return builder.bitcast(builder.lshr(builder.bitcast(codes, _SHORTS), counts), _BYTES)

    def exception(self, builder: Any, number: Any) -> list[Any]:
        """Return the vectors of the panel's exception with this number, and prefetch what comes after it."""
        words = builder.gep(self._words, [builder.mul(number, _number(STEP_BYTES // 4))])
        prefetching = builder.gep(words, [_number(_PREFETCHED_EXCEPTIONS * STEP_BYTES // 4)])
        first = _number(0) if self._half is None else builder.mul(self._half, _number(_GROUP_VECTORS * LANES))
        vectors = []
        for v in range(self.vectors):
            offset = builder.add(first, _number(v * LANES))
            prefetch(builder, builder.gep(prefetching, [offset]))
            vectors.append(builder.load(builder.bitcast(builder.gep(words, [offset]), WORDS.as_pointer()), align=4))
        prefetch(builder, builder.gep(self.numbers, [builder.add(number, _number(LANES))]))
        return vectors


def _multiply(builder: Any, operand: Any, rows: int, at: Any, weights: list[Any], sums: list[Any]) -> list[Any]:
    """Return the sums, row by row, with the products of one step added."""
    totals = list(sums)
    width = len(weights)
    for row in range(rows):
        place = builder.add(builder.mul(operand.stride, _number(row)), at)
        x = splat(builder, builder.load(builder.gep(operand.words, [place]), align=4))
        for v in range(width):
            totals[row * width + v] = operand.step(builder, totals[row * width + v], x, weights[v], 0)
    return totals


def _emit(builder: Any, operand: Any, rows: int, panel: _Panel, prefetching: Any) -> list[Any]:
    """Emit the loop over steps: stretches of ordinary ones, between exceptions and the switch point of the prefetch."""
    ahead, move, switch, jump = (builder.extract_value(prefetching, i) for i in range(4))
    steps = operand.steps
    zero = _number(0)
    one = _number(1)
    entry = builder.block
    blocks = ("stretch", "steps", "over", "exception", "again", "sums")
    stretch, body, over, exception, again, done = (builder.append_basic_block(name) for name in blocks)
    nothing = [ir.Constant(FLOATS, [0.0] * LANES)] * (rows * panel.vectors)
    builder.branch(stretch)

    builder.position_at_end(stretch)
    start = builder.phi(INDEX)
    number = builder.phi(INDEX)
    start_sums = [builder.phi(FLOATS) for _ in nothing]
    next_exception = builder.sext(builder.load(builder.gep(panel.numbers, [number]), align=4), INDEX)
    before_turn = builder.icmp_signed("<", start, switch)
    limit = builder.select(before_turn, switch, steps)
    limit = builder.select(builder.icmp_signed("<", next_exception, limit), next_exception, limit)
    moved = builder.add(ahead, builder.mul(start, move))
    address = builder.select(before_turn, moved, builder.add(moved, jump))
    builder.cbranch(builder.icmp_signed("<", start, limit), body, over)

    builder.position_at_end(body)
    at = builder.phi(INDEX)
    asked = builder.phi(INDEX)
    sums = [builder.phi(FLOATS) for _ in nothing]
    lines = builder.inttoptr(asked, _BYTE.as_pointer())
    for line in range(BF12_STEP_BYTES // _LINE_BYTES * panel.vectors // (2 * _GROUP_VECTORS) or 1):
        prefetch(builder, builder.gep(lines, [_number(line * _LINE_BYTES)]))
    totals = _multiply(builder, operand, rows, at, panel.step(builder, at), sums)
    following = builder.add(at, one)
    further = builder.add(asked, move)
    for phi, first, value in zip(
        (at, asked, *sums), (start, address, *start_sums), (following, further, *totals), strict=True
    ):
        phi.add_incoming(first, stretch)
        phi.add_incoming(value, body)
    builder.cbranch(builder.icmp_signed("<", following, limit), body, over)

    builder.position_at_end(over)
    reached = builder.phi(INDEX)
    over_sums = [builder.phi(FLOATS) for _ in nothing]
    for phi, first, value in zip((reached, *over_sums), (start, *start_sums), (following, *totals), strict=True):
        phi.add_incoming(first, stretch)
        phi.add_incoming(value, body)
    ended = builder.icmp_signed(">=", reached, steps)
    ordinary = builder.icmp_signed("!=", reached, next_exception)
    builder.cbranch(ended, done, again)

    builder.position_at_end(again)
    builder.cbranch(ordinary, stretch, exception)

    builder.position_at_end(exception)
    exact = _multiply(builder, operand, rows, reached, panel.exception(builder, number), over_sums)
    after = builder.add(reached, one)
    next_number = builder.add(number, one)
    builder.branch(stretch)
    incoming = (
        (entry, (zero, zero, *nothing)),
        (again, (reached, number, *over_sums)),
        (exception, (after, next_number, *exact)),
    )
    for block, values in incoming:
        for phi, value in zip((start, number, *start_sums), values, strict=True):
            phi.add_incoming(value, block)

    builder.position_at_end(done)
    return over_sums


def _tile(rows: int, whole: bool) -> Any:
    """Make an intrinsic `tile(inputs, like, first_row, panel_address, half, prefetching, out)`, as in dot_bf16.py."""

    @intrinsic
    def tile(
        typing: Any, inputs: Any, like: Any, first_row: Any, panel: Any, half: Any, prefetching: Any, out: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            operand = Operand(context, builder, signature.args[0], args[0], args[2], signature.args[1])
            weights = _Panel(builder, args[3], None if whole else args[4])
            totals = _emit(builder, operand, rows, weights, args[5])
            store_sums(context, builder, signature.args[6], args[6], _number(0), 0, rows, totals)
            return context.get_dummy_value()

        return types.void(inputs, like, types.int64, types.int64, types.int64, PREFETCH, out), codegen

    return tile


_wide_1, _wide_2, _wide_3, _wide_4, _wide_5, _wide_6 = (_tile(rows, True) for rows in range(1, TILE_ROWS + 1))
_half_1, _half_2, _half_3, _half_4, _half_5, _half_6 = (_tile(rows, False) for rows in range(1, TILE_ROWS + 1))


@njit(nogil=True, cache=True)
def multiply_bf12_panel(
    inputs: Any, like: Any, first_row: int, rows: int, panel: int, prefetching: Any, out: Any
) -> None:
    """Compute out[r, :PANEL] = inputs[first_row + r] . panel for up to TILE_ROWS rows, as `multiply_panel` gives it.

    `panel` is the address of a bf12 panel.
    """
    if rows == 1:
        _wide_1(inputs, like, first_row, panel, 0, prefetching, out)
    elif rows == 2:
        _wide_2(inputs, like, first_row, panel, 0, prefetching, out)
    elif rows == 3:
        _wide_3(inputs, like, first_row, panel, 0, prefetching, out)
    elif rows == 4:
        _wide_4(inputs, like, first_row, panel, 0, prefetching, out)
    elif rows == 5:
        _wide_5(inputs, like, first_row, panel, 0, prefetching, out)
    else:
        _wide_6(inputs, like, first_row, panel, 0, prefetching, out)


@njit(nogil=True, cache=True)
def multiply_bf12_half_panel(
    inputs: Any, like: Any, first_row: int, rows: int, panel: int, half: int, prefetching: Any, out: Any
) -> None:
    """Compute out[r, : PANEL // 2] = inputs[first_row + r] . one half of a bf12 panel, for up to TILE_ROWS rows."""
    if rows == 1:
        _half_1(inputs, like, first_row, panel, half, prefetching, out)
    elif rows == 2:
        _half_2(inputs, like, first_row, panel, half, prefetching, out)
    elif rows == 3:
        _half_3(inputs, like, first_row, panel, half, prefetching, out)
    elif rows == 4:
        _half_4(inputs, like, first_row, panel, half, prefetching, out)
    elif rows == 5:
        _half_5(inputs, like, first_row, panel, half, prefetching, out)
    else:
        _half_6(inputs, like, first_row, panel, half, prefetching, out)
