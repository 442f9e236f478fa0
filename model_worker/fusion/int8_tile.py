"""The innermost loop of a product with int8 weights: widened in registers for a few rows, or once for many.

Knows LLVM and panels as int8_linear.py describes them: a line of memory is what half a panel takes of a pair of inputs,
in the order in which bytes looked up in tables fall into their vectors. Integers up to 127 are exact in bfloat16 as in
float32, so nothing is rounded. Does not know scales, nor what is multiplied.
"""

from __future__ import annotations

from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types

from model_worker.fusion.tile import (
    EARLY,
    FLOATS,
    HAS_BYTE_TABLES,
    INDEX,
    LANES,
    WORD,
    WORDS,
    Operand,
    emit_products,
    prefetch,
    splat,
    store_sums,
)

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic

INT8_ROWS = 4
"""More rows leave too few registers for the widening."""

_LINE_BYTES, _LANE_BYTES = 64, 16
_BYTES, _COUPLES = ir.VectorType(ir.IntType(8), _LINE_BYTES), ir.VectorType(ir.IntType(16), 2 * LANES)
# The bfloat16 of 0 to 127.
_BITS = (np.arange(2 * _LINE_BYTES, dtype=np.float32).view(np.uint32) >> 16).tolist()
_UPPER, _LOWER = [bits >> 8 for bits in _BITS], [bits & 0xFF for bits in _BITS]


def _looked_up(builder: Any, line: Any) -> list[Any]:
    """A line's two vectors as pairs of bfloat16, both bytes of which are looked up by the magnitude of the weight."""
    nothing = ir.Constant(_BYTES, [0] * _LINE_BYTES)
    signs = builder.and_(line, ir.Constant(_BYTES, [0x80] * _LINE_BYTES))
    magnitude = builder.select(builder.icmp_signed("<", line, nothing), builder.sub(nothing, line), line)
    kind = ir.FunctionType(_BYTES, (_BYTES, _BYTES, _BYTES))
    look_up = builder.module.declare_intrinsic("llvm.x86.avx512.vpermi2var.qi.512", (), kind)
    upper, lower = (
        builder.call(look_up, (ir.Constant(_BYTES, table[:64]), magnitude, ir.Constant(_BYTES, table[64:])))
        for table in (_UPPER, _LOWER)
    )
    upper, pairs = builder.or_(upper, signs), []
    for v in range(2):
        bytes_of_v = [_LANE_BYTES * lane + 8 * v + i for lane in range(4) for i in range(8)]
        order = [place + table for place in bytes_of_v for table in (0, _LINE_BYTES)]
        mask = ir.Constant(ir.VectorType(WORD, _LINE_BYTES), order)
        pairs.append(builder.bitcast(builder.shuffle_vector(lower, upper, mask), WORDS))
    return pairs


def _couples(builder: Any, line: Any) -> list[Any]:
    """A line's two vectors as words whose lower half are the weights of the two inputs of a pair."""
    couples, words = builder.bitcast(line, _COUPLES), []
    for v in range(2):
        mask = ir.Constant(WORDS, [8 * lane + 4 * v + i for lane in range(4) for i in range(4)])
        words.append(builder.zext(builder.shuffle_vector(couples, couples, mask), WORDS))
    return words


def _float(builder: Any, words: Any, shift: Any) -> Any:
    """The byte that a shift to the left brings to the upper end of each word, as a float32."""
    integers = builder.ashr(builder.shl(words, shift), ir.Constant(WORDS, [24] * LANES))
    return builder.bitcast(builder.sitofp(integers, FLOATS), WORDS)


def _pairs(builder: Any, line: Any) -> list[Any]:
    """A line's two vectors as pairs of bfloat16, for processors that cannot look up bytes."""
    pairs = []
    for words in _couples(builder, line):
        first, second = (_float(builder, words, ir.Constant(WORDS, [shift] * LANES)) for shift in (24, 16))
        # The lower halves of such small whole numbers are zero.
        pairs.append(builder.or_(builder.lshr(first, ir.Constant(WORDS, [16] * LANES)), second))
    return pairs


def _floats(builder: Any, line: Any, at: Any) -> list[Any]:
    """A line's two vectors as float32, of one input of its pair."""
    odd = builder.and_(builder.trunc(at, WORD), ir.Constant(WORD, 1))
    shift = builder.sub(ir.Constant(WORD, 24), builder.shl(odd, ir.Constant(WORD, 3)))
    return [_float(builder, words, splat(builder, shift)) for words in _couples(builder, line)]


def _step(builder: Any, address: Any, ahead: Any, at: Any, bfloat16: bool, halves: int) -> list[Any]:
    """The vectors of a step of half a panel or a whole one, as words of the operand's type."""
    pair = at if bfloat16 else builder.lshr(at, ir.Constant(INDEX, 1))
    begin = builder.gep(address, [builder.mul(pair, ir.Constant(INDEX, 2 * _LINE_BYTES))])
    early = builder.inttoptr(ahead, ir.IntType(8).as_pointer())
    vectors = []
    for half in range(halves):
        prefetch(builder, builder.gep(early, [ir.Constant(INDEX, half * _LINE_BYTES)]))
        place = builder.gep(begin, [ir.Constant(INDEX, half * _LINE_BYTES)])
        line = builder.load(builder.bitcast(place, _BYTES.as_pointer()), align=1)
        if not bfloat16:
            vectors += _floats(builder, line, at)
        else:
            vectors += _looked_up(builder, line) if HAS_BYTE_TABLES else _pairs(builder, line)
    return vectors


def _tile(rows: int, vectors: int, keep: bool) -> Any:
    """An intrinsic `tile(inputs, first_row, panel_address, early, room, out)` with sums as in tile.py.

    With `keep`, room[step] = that step as tile.py reads it.
    """

    @intrinsic
    def tile(typing: Any, inputs: Any, first_row: Any, panel: Any, early: Any, room: Any, out: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            operand = Operand(context, builder, signature.args[0], args[0], args[1])
            address = builder.inttoptr(args[2], ir.IntType(8).as_pointer())
            memory = context.make_array(signature.args[4])(context, builder, args[4]).data

            def fetch(at: Any, ahead: Any) -> list[Any]:
                words = _step(builder, address, ahead, at, operand.bfloat16, vectors // 2)
                if keep:
                    kept = builder.gep(memory, [builder.mul(at, ir.Constant(INDEX, 4 * LANES))])
                    for v, vector in enumerate(words):
                        place = builder.gep(kept, [ir.Constant(INDEX, v * LANES)])
                        builder.store(vector, builder.bitcast(place, WORDS.as_pointer()), align=4)
                return words

            nothing = [ir.Constant(FLOATS, [0.0] * LANES)] * (rows * vectors)
            totals = emit_products(
                builder, rows, operand.step, operand.words, operand.width, operand.width, fetch, nothing, args[3]
            )
            store_sums(context, builder, signature.args[5], args[5], ir.Constant(INDEX, 0), 0, rows, totals)
            return context.get_dummy_value()

        return types.void(inputs, types.int64, types.int64, EARLY, room, out), codegen

    return tile


_wide_1, _wide_2, _wide_3, _wide_4 = (_tile(rows, 4, keep=False) for rows in range(1, INT8_ROWS + 1))
_half_1, _half_2, _half_3, _half_4 = (_tile(rows, 2, keep=False) for rows in range(1, INT8_ROWS + 1))
_wide_kept, _half_kept = _tile(INT8_ROWS, 4, keep=True), _tile(INT8_ROWS, 2, keep=True)


@njit(nogil=True, cache=True)
def multiply_int8_panel(inputs: Any, first_row: int, rows: int, panel: int, early: Any, room: Any, out: Any) -> None:
    """out[r, :PANEL] = inputs[first_row + r] . panel for up to INT8_ROWS rows, without scales.

    `inputs` are C-contiguous uint16 (bfloat16's bits) or float32, as wide as the panel; `panel` is an address. `room`
    is uint32 [steps, PANEL], and not written.
    """
    if rows == 1:
        _wide_1(inputs, first_row, panel, early, room, out)
    elif rows == 2:
        _wide_2(inputs, first_row, panel, early, room, out)
    elif rows == 3:
        _wide_3(inputs, first_row, panel, early, room, out)
    else:
        _wide_4(inputs, first_row, panel, early, room, out)


@njit(nogil=True, cache=True)
def multiply_int8_half_panel(
    inputs: Any, first_row: int, rows: int, panel: int, early: Any, room: Any, out: Any
) -> None:
    """The same for the half of a panel that begins at the address `panel`: out[r, : PANEL // 2]."""
    if rows == 1:
        _half_1(inputs, first_row, panel, early, room, out)
    elif rows == 2:
        _half_2(inputs, first_row, panel, early, room, out)
    elif rows == 3:
        _half_3(inputs, first_row, panel, early, room, out)
    else:
        _half_4(inputs, first_row, panel, early, room, out)


@njit(nogil=True, cache=True)
def multiply_and_keep(inputs: Any, panel: int, whole: bool, early: Any, room: Any, out: Any) -> None:
    """The same for the first INT8_ROWS rows, and the panel, or the half of one, stays in `room` as tile.py reads it."""
    if whole:
        _wide_kept(inputs, 0, panel, early, room, out)
    else:
        _half_kept(inputs, 0, panel, early, room, out)
