"""The innermost loop of a product with weights in codes that are floats: a few rows by half a panel.

Codes of eight bits are FP8 (e4m3), those of four bits the places of a table of sixteen float32. Knows LLVM, and groups
of codes as code_groups.py describes them. Codes become float32 in registers, once for all rows of a tile, and are
multiplied by float32 inputs as these are. The sum of a group is scaled, and groups are added in order: so a row's
result does not depend on the other rows. Does not know where scales come from.
"""

from __future__ import annotations

from typing import Any

import numba.extending
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types

from model_worker.cpu.simd.code_groups import HALF_LANES, TABLE_VALUES, every_lane, index
from model_worker.cpu.simd.dot_bf16 import (
    FEATURES,
    FLOATS,
    LANES,
    PREFETCH,
    WORD,
    WORDS,
    register_groups,
    splat,
    sums_at,
)
from model_worker.cpu.simd.dot_codes import (
    CODED_ROWS,
    GROUP_INPUTS,
    STEPS,
    VECTORS,
    emit_prefetches,
    load_floats,
    loop,
    multiply_add,
)
from model_worker.cpu.simd.fixed_point import PLACES, WORD_BYTES

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic

# Bits of codes that are FP8, and of those that are places of a table.
FP8_BITS = 8
PLACE_BITS = 4
# Bits of a word above its byte number 0.
_ABOVE = 24
# Bits of float32's exponent that FP8's has not.
_LACKING = 4
# The sign, and the places that FP8's exponent and mantissa have in a float32.
_KEPT = 0x87F00000
# Such a float32 is too small by this factor, since the offsets of the exponents differ.
_OFFSET = 2.0**120
_NOTHING = ir.Constant(FLOATS, [0.0] * LANES)
# What makes the upper bit of a place in a table the sign of a word.
_TO_SIGN = 28
_HALF_FLOATS = ir.VectorType(ir.FloatType(), LANES // 2)
_HALF_WORDS = ir.VectorType(WORD, LANES // 2)
# Instructions that take values out of a register by their places: of sixteen, or of eight.
_PICKS_OF_SIXTEEN: bool = FEATURES.get("avx512f", False)
_PICKS_OF_EIGHT: bool = FEATURES.get("avx2", False)


class _Fp8:
    """Codes of eight bits: a word has four inputs of a step."""

    words = STEPS

    def __init__(self, builder: Any, table: Any) -> None:
        self._builder = builder

    def word(self, step: int) -> int:
        """Return the number of the word in a group that has this step."""
        return step

    def value(self, words: Any, step: int, byte: int) -> Any:
        """Return the float32 of a byte of a step."""
        builder = self._builder
        upper = builder.shl(words, every_lane(_ABOVE - 8 * byte)) if byte < WORD_BYTES - 1 else words
        bits = builder.and_(builder.ashr(upper, every_lane(_LACKING)), every_lane(_KEPT))
        return builder.fmul(builder.bitcast(bits, FLOATS), ir.Constant(FLOATS, [_OFFSET] * LANES))


class _OfTable:
    """Codes of four bits: a word has the inputs of two steps. `table` is the address of the values."""

    words = STEPS // 2

    def __init__(self, builder: Any, table: Any) -> None:
        self._builder = builder
        self._address = table
        place = builder.inttoptr(table, FLOATS.as_pointer())
        self._table = builder.load(place, align=4)

    def word(self, step: int) -> int:
        return step // 2

    def value(self, words: Any, step: int, byte: int) -> Any:
        builder = self._builder
        # What lies above a place does not matter to the instructions.
        places = builder.lshr(words, every_lane(8 * byte + 4 * (step % 2)))
        if _PICKS_OF_SIXTEEN:
            kind = ir.FunctionType(FLOATS, (FLOATS, WORDS))
            pick = builder.module.declare_intrinsic("llvm.x86.avx512.permvar.sf.512", (), kind)
            return builder.call(pick, (self._table, places))
        halves = [self._part(places, half, WORDS) for half in range(2)]
        picked = [(self._of_eight if _PICKS_OF_EIGHT else self._one_by_one)(half) for half in halves]
        every = ir.Constant(WORDS, list(range(LANES)))
        return builder.shuffle_vector(*picked, every)

    def _part(self, vector: Any, half: int, kind: Any) -> Any:
        lanes = [half * LANES // 2 + lane for lane in range(LANES // 2)]
        return self._builder.shuffle_vector(vector, ir.Constant(kind, ir.Undefined), ir.Constant(_HALF_WORDS, lanes))

    def _of_eight(self, places: Any) -> Any:
        builder = self._builder
        kind = ir.FunctionType(_HALF_FLOATS, (_HALF_FLOATS, _HALF_WORDS))
        pick = builder.module.declare_intrinsic("llvm.x86.avx2.permps", (), kind)
        lower, upper = (builder.call(pick, (self._part(self._table, half, FLOATS), places)) for half in range(2))
        signs = builder.shl(places, ir.Constant(_HALF_WORDS, [_TO_SIGN] * (LANES // 2)))
        is_upper = builder.icmp_signed("<", signs, ir.Constant(_HALF_WORDS, [0] * (LANES // 2)))
        return builder.select(is_upper, upper, lower)

    def _one_by_one(self, places: Any) -> Any:
        builder = self._builder
        values = builder.inttoptr(self._address, ir.FloatType().as_pointer())
        picked = ir.Constant(_HALF_FLOATS, ir.Undefined)
        for lane in range(LANES // 2):
            at = ir.Constant(WORD, lane)
            place = builder.and_(builder.extract_element(places, at), ir.Constant(WORD, TABLE_VALUES - 1))
            picked = builder.insert_element(picked, builder.load(builder.gep(values, [place]), align=4), at)
        return picked


def _emit_group(builder: Any, at: Any, place: Any, codes: Any, vectors: range, inputs: list[Any]) -> list[Any]:
    """Emit the sums of group number `at`, row by row. `place` points to the codes, `inputs` to rows of float32."""
    sums = [_NOTHING] * (len(inputs) * len(vectors))
    first_word = builder.mul(at, index(codes.words * HALF_LANES))
    first_input = builder.mul(at, index(GROUP_INPUTS))
    loaded: dict[int, list[Any]] = {}
    for step in range(STEPS):
        number = codes.word(step)
        if number not in loaded:
            offsets = [builder.add(first_word, index(number * HALF_LANES + v * LANES)) for v in vectors]
            places = [builder.bitcast(builder.gep(place, [offset]), WORDS.as_pointer()) for offset in offsets]
            loaded[number] = [builder.load(one, align=4) for one in places]
        for byte in range(WORD_BYTES):
            values = [codes.value(words, step, byte) for words in loaded[number]]
            of_input = builder.add(first_input, index(step * WORD_BYTES + PLACES[byte]))
            for row, of_row in enumerate(inputs):
                x = splat(builder, builder.load(builder.gep(of_row, [of_input]), align=4))
                for v, value in enumerate(values):
                    own = row * len(values) + v
                    sums[own] = multiply_add(builder, x, value, sums[own])
    return sums


def _tile(bits: int, rows: int) -> Any:
    """Make an intrinsic `tile(inputs, first_row, table, codes, scales, groups, prefetching, out, column)`.

    out[r, column + lane] = inputs[first_row + r] . half a panel. `table`, `codes` and `scales` are addresses, the last
    of float32 [groups, outputs].
    """

    @intrinsic
    def tile(
        typing: Any,
        inputs: Any,
        first_row: Any,
        table: Any,
        codes: Any,
        scales: Any,
        groups: Any,
        prefetching: Any,
        out: Any,
        column: Any,
    ) -> Any:
        assert inputs.dtype == types.float32

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, args[0])
            width = builder.extract_value(array.shape, 1)
            numbers = [builder.add(args[1], index(row)) for row in range(rows)]
            of_rows = [builder.gep(array.data, [builder.mul(row, width)]) for row in numbers]
            kind = (_Fp8 if bits == FP8_BITS else _OfTable)(builder, args[2])
            place = builder.inttoptr(args[3], WORD.as_pointer())
            for turn, vectors in enumerate(register_groups(rows, VECTORS)):
                at, totals, end = loop(builder, args[5], [_NOTHING] * (rows * len(vectors)))
                if turn == 0:
                    emit_prefetches(builder, args[6], at, bits, rows)
                sums = _emit_group(builder, at, place, kind, vectors, of_rows)
                scale = load_floats(builder, args[4], at, vectors)
                scaled = zip(sums, scale * rows, totals, strict=True)
                totals = end([multiply_add(builder, *each) for each in scaled])
                begin = builder.add(args[8], index(vectors[0] * LANES))
                places = sums_at(context, builder, signature.args[7], args[7], index(0), begin, rows, len(vectors))
                for to, total in zip(places, totals, strict=True):
                    builder.store(total, to, align=4)
            return context.get_dummy_value()

        return types.void(inputs, *(types.int64,) * 5, PREFETCH, out, types.int64), codegen

    return tile


_fp8_1, _fp8_2, _fp8_4 = (_tile(FP8_BITS, rows) for rows in (1, 2, CODED_ROWS))
_table_1, _table_2, _table_4 = (_tile(PLACE_BITS, rows) for rows in (1, 2, CODED_ROWS))


@njit(nogil=True, cache=True)
def multiply_floats(
    bits: int,
    inputs: Any,
    first: int,
    rows: int,
    table: int,
    codes: int,
    scales: int,
    groups: int,
    prefetching: Any,
    out: Any,
    column: int,
) -> None:
    """Compute out[:, column + lane] = 1, 2 or CODED_ROWS rows of float32 . half a panel."""
    if bits == FP8_BITS:
        if rows == 1:
            _fp8_1(inputs, first, table, codes, scales, groups, prefetching, out, column)
        elif rows == 2:
            _fp8_2(inputs, first, table, codes, scales, groups, prefetching, out, column)
        else:
            _fp8_4(inputs, first, table, codes, scales, groups, prefetching, out, column)
    elif rows == 1:
        _table_1(inputs, first, table, codes, scales, groups, prefetching, out, column)
    elif rows == 2:
        _table_2(inputs, first, table, codes, scales, groups, prefetching, out, column)
    else:
        _table_4(inputs, first, table, codes, scales, groups, prefetching, out, column)
