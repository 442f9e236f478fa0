"""The innermost loop of a product with packed weights: a few rows by a panel, or by half of one.

Knows LLVM and panels as linears.py describes them: words of one float32 or of two bfloat16, `[panel, step, PANEL]`.
All sums of a tile stay in vector registers while its panel streams by once, so one row runs at the speed of memory
and many rows at that of arithmetic. Does not know what is multiplied, nor who else multiplies.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba
import numba.extending
from llvmlite import ir
from numba import njit, types

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic

TILE_ROWS = 6
"""Six rows by four vectors of sums leave eight of 32 vector registers for weights and inputs."""

_LANES = 16
_WORD, _INDEX, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _WORDS = ir.VectorType(_FLOAT, _LANES), ir.VectorType(_WORD, _LANES)
_numba_config: Any = numba.config
# Where numba was told to compile for another CPU than this one, nothing is known of its instructions.
_HAS_BF16_DOT = not _numba_config.CPU_NAME and llvm.get_host_cpu_features().get("avx512bf16", False)
# Panels are read once and from end to end, but memory is far away: ask for lines this many steps early.
_PREFETCH_STEPS = 16


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_BFLOATS = ir.VectorType(_BFloat(), 2 * _LANES)


def _splat(builder: Any, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, _LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_WORD, 0))
    mask = ir.Constant(ir.VectorType(_WORD, _LANES), [0] * _LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)


def _fma(builder: Any, total: Any, a: Any, b: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, (_FLOATS, _FLOATS, _FLOATS))
    function = builder.module.declare_intrinsic("llvm.fmuladd.v16f32", (), kind)
    return builder.call(function, (a, b, total))


def _halves(builder: Any, words: Any) -> tuple[Any, Any]:
    """The two bfloat16 of each word as float32: the first is the lower half."""
    shift, mask = ir.Constant(_WORDS, [16] * _LANES), ir.Constant(_WORDS, [0xFFFF0000] * _LANES)
    return builder.bitcast(builder.shl(words, shift), _FLOATS), builder.bitcast(builder.and_(words, mask), _FLOATS)


def _step_bfloat16(builder: Any, total: Any, x: Any, w: Any) -> Any:
    if _HAS_BF16_DOT:
        kind = ir.FunctionType(_FLOATS, (_FLOATS, _BFLOATS, _BFLOATS))
        function = builder.module.declare_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", (), kind)
        return builder.call(function, (total, builder.bitcast(x, _BFLOATS), builder.bitcast(w, _BFLOATS)))
    for a, b in zip(_halves(builder, x), _halves(builder, w), strict=True):
        total = _fma(builder, total, a, b)
    return total


def _step_float32(builder: Any, total: Any, x: Any, w: Any) -> Any:
    return _fma(builder, total, builder.bitcast(x, _FLOATS), builder.bitcast(w, _FLOATS))


def _emit(builder: Any, rows: int, vectors: int, step: Any, inputs: Any, stride: Any, panel: Any, steps: Any) -> Any:
    """The loop over steps. `inputs` and `panel` point to words; `stride` is the words from one input row to the next.

    Returns the sums, `rows` times `vectors` of them.
    """
    entry = builder.block
    body, done = builder.append_basic_block("steps"), builder.append_basic_block("sums")
    starts = [builder.gep(inputs, [builder.mul(stride, ir.Constant(_INDEX, row))]) for row in range(rows)]
    builder.branch(body)
    builder.position_at_end(body)
    at = builder.phi(_INDEX)
    sums = [builder.phi(_FLOATS) for _ in range(rows * vectors)]
    line = builder.gep(panel, [builder.mul(at, ir.Constant(_INDEX, 4 * _LANES))])
    _prefetch(builder, line, vectors)
    weights = [
        builder.load(
            builder.bitcast(builder.gep(line, [ir.Constant(_INDEX, v * _LANES)]), _WORDS.as_pointer()), align=4
        )
        for v in range(vectors)
    ]
    totals = []
    for row in range(rows):
        x = _splat(builder, builder.load(builder.gep(starts[row], [at]), align=4))
        totals += [step(builder, sums[row * vectors + v], x, weights[v]) for v in range(vectors)]
    following = builder.add(at, ir.Constant(_INDEX, 1))
    at.add_incoming(ir.Constant(_INDEX, 0), entry)
    at.add_incoming(following, body)
    for phi, total in zip(sums, totals, strict=True):
        phi.add_incoming(ir.Constant(_FLOATS, [0.0] * _LANES), entry)
        phi.add_incoming(total, body)
    builder.cbranch(builder.icmp_signed("<", following, steps), body, done)
    builder.position_at_end(done)
    return totals


def _prefetch(builder: Any, line: Any, vectors: int) -> None:
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), (byte, _WORD, _WORD, _WORD))
    function = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
    for v in range(vectors):
        ahead = builder.gep(line, [ir.Constant(_INDEX, _PREFETCH_STEPS * 4 * _LANES + v * _LANES)])
        builder.call(function, (builder.bitcast(ahead, byte), *(ir.Constant(_WORD, value) for value in (0, 3, 1))))


def _tile(rows: int, vectors: int) -> Any:
    """An intrinsic `tile(inputs, first_row, panel_address, out)`: out[r, lane] = inputs[first_row + r] . panel."""

    @intrinsic
    def tile(typing: Any, inputs: Any, first_row: Any, panel: Any, out: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            inputs_type, _, _, out_type = signature.args
            x, c = context.make_array(inputs_type)(context, builder, args[0]), None
            c = context.make_array(out_type)(context, builder, args[3])
            bfloat16 = inputs_type.dtype == types.uint16
            width = builder.extract_value(x.shape, 1)
            steps = builder.lshr(width, ir.Constant(_INDEX, 1)) if bfloat16 else width
            words = builder.gep(builder.bitcast(x.data, _WORD.as_pointer()), [builder.mul(args[1], steps)])
            address = builder.inttoptr(args[2], _WORD.as_pointer())
            step = _step_bfloat16 if bfloat16 else _step_float32
            totals = _emit(builder, rows, vectors, step, words, steps, address, steps)
            for index, total in enumerate(totals):
                row, v = divmod(index, vectors)
                place = builder.gep(c.data, [ir.Constant(_INDEX, row * 4 * _LANES + v * _LANES)])
                builder.store(total, builder.bitcast(place, _FLOATS.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(inputs, types.int64, types.int64, out), codegen

    return tile


_wide_1, _wide_2, _wide_3, _wide_4, _wide_5, _wide_6 = (_tile(rows, 4) for rows in range(1, TILE_ROWS + 1))
_half_1, _half_2, _half_3, _half_4, _half_5, _half_6 = (_tile(rows, 2) for rows in range(1, TILE_ROWS + 1))


@njit(nogil=True, cache=True)
def multiply_panel(inputs: Any, first_row: int, rows: int, panel: int, out: Any) -> None:
    """out[r, :PANEL] = inputs[first_row + r] . panel for up to TILE_ROWS rows.

    `inputs` are C-contiguous uint16 (bfloat16's bits) or float32, as wide as the panel has steps; `panel` is an
    address.
    """
    if rows == 1:
        _wide_1(inputs, first_row, panel, out)
    elif rows == 2:
        _wide_2(inputs, first_row, panel, out)
    elif rows == 3:
        _wide_3(inputs, first_row, panel, out)
    elif rows == 4:
        _wide_4(inputs, first_row, panel, out)
    elif rows == 5:
        _wide_5(inputs, first_row, panel, out)
    else:
        _wide_6(inputs, first_row, panel, out)


@njit(nogil=True, cache=True)
def multiply_half_panel(inputs: Any, first_row: int, rows: int, panel: int, out: Any) -> None:
    """The same for the half of a panel that begins at the address `panel`: out[r, : PANEL // 2]."""
    if rows == 1:
        _half_1(inputs, first_row, panel, out)
    elif rows == 2:
        _half_2(inputs, first_row, panel, out)
    elif rows == 3:
        _half_3(inputs, first_row, panel, out)
    elif rows == 4:
        _half_4(inputs, first_row, panel, out)
    elif rows == 5:
        _half_5(inputs, first_row, panel, out)
    else:
        _half_6(inputs, first_row, panel, out)
