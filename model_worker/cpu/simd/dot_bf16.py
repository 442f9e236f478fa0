"""The innermost loop of a product with packed weights: a few rows by a panel, or by half of one.

Knows LLVM and panels as packed_linear.py describes them: words of a float32 or two bfloat16, `[panel, step, PANEL]`;
and those of float16, as half_linear.py does.
Operands of bfloat16 weights are bfloat16 too where there are instructions for it, and otherwise float32, so that only
the weights have to be widened, once for all rows.

All sums of a tile stay in vector registers while its panel streams by once, so one row runs at the speed of memory and
many rows at that of arithmetic. Does not know the meaning of operands, nor of other cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba
import numba.extending
import numpy as np
from llvmlite import ir
from numba import njit, types

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic

# Six rows by four vectors of sums leave eight of 32 vector registers for weights and inputs.
TILE_ROWS = 6

LANES = 16
WORD = ir.IntType(32)
INDEX = ir.IntType(64)
_FLOAT = ir.FloatType()
FLOATS = ir.VectorType(_FLOAT, LANES)
WORDS = ir.VectorType(WORD, LANES)
_numba_config: Any = numba.config


def _features() -> dict[str, bool]:
    """Return the instructions of this CPU, or those that numba was given where it compiles for another one."""
    if _numba_config.CPU_NAME:
        given = (_numba_config.CPU_FEATURES or "").split(",")
        return {name[1:]: name.startswith("+") for name in given if name}
    return dict(llvm.get_host_cpu_features())


FEATURES = _features()
# Whether there are instructions for bfloat16.
HAS_BF16_DOT: bool = FEATURES.get("avx512bf16", False)
_HAS_WIDE_REGISTERS: bool = FEATURES.get("avx512f", False)
# Elsewhere there are 16 registers of half the width: these sums leave half of them for weights and inputs.
_NARROW_SUMS = 4
# Rows of a piece: many rows are multiplied that many at a time.
PIECE_ROWS = TILE_ROWS if _HAS_WIDE_REGISTERS else 4
# Whether there are instructions that multiply bytes in fours.
HAS_BYTE_DOT: bool = FEATURES.get("avx512vnni", False)
# Whether there are instructions that multiply numbers of 16 bits in pairs.
HAS_SHORT_DOT: bool = FEATURES.get("avx2", False)
# Bytes of a panel for each step.
STEP_BYTES = 256


def _first_level_bytes() -> int | None:
    """Return the bytes of a core's first-level cache for data; None where Linux does not say."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index0/size").read_text(encoding="ascii").strip()
        return int(size.removesuffix("K")) << 10
    except (OSError, ValueError):
        return None


_SMALL_FIRST_LEVEL = 32 << 10
# Whether prefetched lines wait in the second-level cache: the first is too small for them beside inputs and sums. (With
# 32 KiB many rows were a sixth slower; with 48 KiB the first level was the faster place.)
_INTO_SECOND_LEVEL: bool = _HAS_WIDE_REGISTERS and (_first_level_bytes() or 1 << 20) <= _SMALL_FIRST_LEVEL
_LOCALITY = 2 if _INTO_SECOND_LEVEL else 3
# Prefetch distance in bytes where one tile streams a panel by: memory is far away.
PREFETCH_BYTES = 16_384 if _INTO_SECOND_LEVEL else 8192 if _HAS_WIDE_REGISTERS else 1024
# Pieces of rows, which go through a panel one after the other, from which on each prefetches its share of the next
# panel. (With 32 KiB of first level, two pieces were a fifth faster for it; with 48 KiB they have not been measured.)
SHARING_PIECES = 2 if _INTO_SECOND_LEVEL else 3


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


_BFLOATS = ir.VectorType(BFloat(), 2 * LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
# Whether there are instructions that widen float16.
HAS_HALVES: bool = FEATURES.get("f16c", False)


def splat(builder: Any, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(WORD, 0))
    mask = ir.Constant(ir.VectorType(WORD, LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)


def _fma(builder: Any, total: Any, a: Any, b: Any) -> Any:
    kind = ir.FunctionType(FLOATS, (FLOATS, FLOATS, FLOATS))
    function = builder.module.declare_intrinsic("llvm.fmuladd.v16f32", (), kind)
    return builder.call(function, (a, b, total))


def _half(builder: Any, words: Any, part: int) -> Any:
    """Return one of the two bfloat16 of each word as float32: the first is the lower half."""
    if part == 0:
        return builder.bitcast(builder.shl(words, ir.Constant(WORDS, [16] * LANES)), FLOATS)
    return builder.bitcast(builder.and_(words, ir.Constant(WORDS, [0xFFFF0000] * LANES)), FLOATS)


def _pairs_by_pairs(builder: Any, total: Any, x: Any, w: Any, part: int) -> Any:
    kind = ir.FunctionType(FLOATS, (FLOATS, _BFLOATS, _BFLOATS))
    function = builder.module.declare_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", (), kind)
    return builder.call(function, (total, builder.bitcast(x, _BFLOATS), builder.bitcast(w, _BFLOATS)))


def float_by_pairs(builder: Any, total: Any, x: Any, w: Any, part: int) -> Any:
    return _fma(builder, total, builder.bitcast(x, FLOATS), _half(builder, w, part))


def float_by_float(builder: Any, total: Any, x: Any, w: Any, part: int) -> Any:
    return _fma(builder, total, builder.bitcast(x, FLOATS), builder.bitcast(w, FLOATS))


class _HalfVector:
    """What a vector of outputs takes from the two inputs of a step, as float16: each is loaded when it is wanted."""

    def __init__(self, builder: Any, line: Any, vector: int) -> None:
        self._builder = builder
        self._line = line
        # The outputs of half a panel lie together: those of the first input, then those of the second.
        self._place = vector // 2 * 2 * LANES + vector % 2 * LANES // 2
        self._loaded: dict[int, Any] = {}

    def of_input(self, part: int) -> Any:
        """Return the vector for input 0 or 1 of the step, as float32."""
        if part not in self._loaded:
            builder = self._builder
            at = builder.gep(self._line, [ir.Constant(INDEX, self._place + part * LANES)])
            halves = builder.load(builder.bitcast(at, _HALVES.as_pointer()), align=4)
            self._loaded[part] = builder.fpext(halves, FLOATS)
        return self._loaded[part]


def _float_by_halves(builder: Any, total: Any, x: Any, w: _HalfVector, part: int) -> Any:
    return _fma(builder, total, builder.bitcast(x, FLOATS), w.of_input(part))


def operand_dtype(element: Any) -> Any:
    """Return numpy's dtype of operands of weights of this element type (uint16 are bfloat16's bits)."""
    return np.dtype(element if HAS_BF16_DOT else np.float32)


class Operand:
    """The rows of an input array from `first_row` on, as words, of which each step takes `parts`.

    They are multiplied by words of elements as those of the array type `like`.
    """

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any, first_row: Any, like: Any) -> None:
        array = context.make_array(kind)(context, builder, value)
        width = builder.extract_value(array.shape, 1)
        one = ir.Constant(INDEX, 1)
        # int16 stands for float16.
        self.by_halves = like.dtype == types.int16
        pairs = like.dtype == types.uint16 or self.by_halves
        # A float32 operand of bfloat16 weights is multiplied as it is, also by processors that multiply bfloat16.
        assert kind.dtype == types.float32 or (HAS_BF16_DOT and kind.dtype == like.dtype == types.uint16)
        in_pairs = kind.dtype == types.uint16
        self.parts = 2 if pairs and not in_pairs else 1
        of_pairs = _float_by_halves if self.by_halves else _pairs_by_pairs if in_pairs else float_by_pairs
        self.step = of_pairs if pairs else float_by_float
        self.steps = builder.lshr(width, one) if pairs else width
        self.stride = self.steps if in_pairs else width
        self.words = builder.gep(builder.bitcast(array.data, WORD.as_pointer()), [builder.mul(first_row, self.stride)])


def register_groups(rows: int, vectors: int) -> list[range]:
    """Group the vectors that are summed at a time, so that their sums for `rows` rows stay in registers."""
    most = vectors if _HAS_WIDE_REGISTERS else max(1, _NARROW_SUMS // rows)
    count = -(-vectors // most)
    return [range(vectors * i // count, vectors * (i + 1) // count) for i in range(count)]


@njit(nogil=True, cache=True)
def groups_of(rows: int, whole: bool) -> int:
    """Return how often a tile with so many sums for each output goes through a panel, or through half of one."""
    vectors = 4 if whole else 2
    return 1 if _HAS_WIDE_REGISTERS else -(-vectors // max(1, _NARROW_SUMS // rows))


def sums_at(
    context: Any, builder: Any, kind: Any, value: Any, first_row: Any, column: Any, rows: int, vectors: int
) -> list[Any]:
    """Return the addresses of the vectors of `rows` rows of a float32 array, from `first_row` and `column` on."""
    array = context.make_array(kind)(context, builder, value)
    width = builder.extract_value(array.shape, 1)
    places = []
    for row in range(rows):
        begin = builder.add(column, builder.mul(builder.add(first_row, ir.Constant(INDEX, row)), width))
        for v in range(vectors):
            place = builder.gep(array.data, [builder.add(begin, ir.Constant(INDEX, v * LANES))])
            places.append(builder.bitcast(place, FLOATS.as_pointer()))
    return places


def store_sums(
    context: Any, builder: Any, kind: Any, value: Any, first_row: Any, vector: int, rows: int, sums: list[Any]
) -> None:
    """Write sums, row by row, to a float32 array from `first_row` on, and from the column where this vector begins."""
    column = ir.Constant(INDEX, vector * LANES)
    places = sums_at(context, builder, kind, value, first_row, column, rows, len(sums) // rows)
    for place, total in zip(places, sums, strict=True):
        builder.store(total, place, align=4)


def load_words(builder: Any, places: list[Any]) -> list[Any]:
    """Load the vectors of words at these addresses."""
    return [builder.load(builder.bitcast(place, WORDS.as_pointer()), align=4) for place in places]


def emit_products(
    builder: Any,
    rows: int,
    step: Any,
    inputs: Any,
    stride: Any,
    steps: Any,
    fetch: Any,
    start: list[Any],
    prefetching: Any = None,
    parts: int = 1,
    by_vector: bool = False,
) -> list[Any]:
    """Emit the loop over steps, and return the sums.

    `inputs` points to words, of which each step takes `parts`; `stride` is the words from one input row to the next.
    `fetch(step, address)` gives the vectors of a step, and may prefetch from that address, as `prefetching` says;
    `start` are the sums to begin with, row by row, which are returned with the products added. `by_vector` takes all
    parts of a vector before the next one, where widening it takes registers; otherwise all vectors of a part.
    """
    entry = builder.block
    vectors = len(start) // rows
    zero = ir.Constant(INDEX, 0)
    ahead, move, switch, jump = (
        [zero] * 4 if prefetching is None else [builder.extract_value(prefetching, i) for i in range(4)]
    )
    no_turn = builder.or_(builder.icmp_signed("<=", switch, zero), builder.icmp_signed(">=", switch, steps))
    first_end = builder.select(no_turn, steps, switch)
    first_ahead = builder.select(builder.icmp_signed("<=", switch, zero), builder.add(ahead, jump), ahead)
    stretch, body, over, done = (builder.append_basic_block(name) for name in ("stretch", "steps", "over", "sums"))
    starts = [builder.gep(inputs, [builder.mul(stride, ir.Constant(INDEX, row))]) for row in range(rows)]
    builder.branch(stretch)
    # A stretch of steps is what lies before or after the switch point of the prefetch: a choice in each step would
    # cost as much as a tenth of it.
    builder.position_at_end(stretch)
    stretch_values = [builder.phi(value.type) for value in (zero, first_ahead, first_end, *start)]
    builder.branch(body)
    builder.position_at_end(body)
    at, address, *sums = [builder.phi(value.type) for value in (zero, first_ahead, *start)]
    weights = fetch(at, address)
    totals = list(sums)
    # LLVM keeps to this order, and what it has to keep meanwhile may not fit the registers.
    turns = [(part, row, v) for part in range(parts) for row in range(rows) for v in range(vectors)]
    if by_vector:
        turns.sort(key=lambda switch: (switch[2], switch[1], switch[0]))
    words: dict[tuple[int, int], Any] = {}
    for part, row, v in turns:
        if (part, row) not in words:
            place = builder.add(builder.mul(at, ir.Constant(INDEX, parts)), ir.Constant(INDEX, part))
            words[part, row] = splat(builder, builder.load(builder.gep(starts[row], [place]), align=4))
        number = row * vectors + v
        totals[number] = step(builder, totals[number], words[part, row], weights[v], part)
    following = builder.add(at, ir.Constant(INDEX, 1))
    further = builder.add(address, move)
    before = [stretch_values[0], stretch_values[1], *stretch_values[3:]]
    last = [following, further, *totals]
    for phi, first, next_value in zip((at, address, *sums), before, last, strict=True):
        phi.add_incoming(first, stretch)
        phi.add_incoming(next_value, body)
    builder.cbranch(builder.icmp_signed("<", following, stretch_values[2]), body, over)
    builder.position_at_end(over)
    again = [following, builder.add(further, jump), steps, *totals]
    for phi, first, next_value in zip(stretch_values, (zero, first_ahead, first_end, *start), again, strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(next_value, over)
    builder.cbranch(builder.icmp_signed("<", following, steps), stretch, done)
    builder.position_at_end(done)
    return totals


def prefetch(builder: Any, line: Any) -> None:
    """Prefetch a line of memory."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), (byte, WORD, WORD, WORD))
    function = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
    builder.call(function, (builder.bitcast(line, byte), *(ir.Constant(WORD, value) for value in (0, _LOCALITY, 1))))


# A tile's prefetch descriptor: address, stride with each step, the step from which on it lies elsewhere (the next panel
# need not be the neighbour), and the offset from there on.
PREFETCH = types.UniTuple(types.int64, 4)


def fetch_panel(builder: Any, address: Any, group: range, halves: bool = False) -> Any:
    """Make the `fetch` of `emit_products` for these vectors of a panel, of float16 with `halves`; it prefetches as many
    lines."""
    offsets = [ir.Constant(INDEX, v * LANES) for v in group]
    lines_ahead = [ir.Constant(INDEX, i * LANES) for i in range(len(group))]

    def fetch(at: Any, ahead: Any) -> list[Any]:
        line = builder.gep(address, [builder.mul(at, ir.Constant(INDEX, 4 * LANES))])
        lines = builder.inttoptr(ahead, WORD.as_pointer())
        for offset in lines_ahead:
            prefetch(builder, builder.gep(lines, [offset]))
        if halves:
            return [_HalfVector(builder, line, v) for v in group]
        return load_words(builder, [builder.gep(line, [offset]) for offset in offsets])

    return fetch


def prefetching_of(builder: Any, prefetching: Any, number: int, steps: Any) -> Any:
    """Return the prefetch descriptor of group `number`: each goes on where the one before it ended."""
    if number == 0:
        return prefetching
    ahead = builder.extract_value(prefetching, 0)
    move = builder.extract_value(prefetching, 1)
    further = builder.add(ahead, builder.mul(builder.mul(steps, ir.Constant(INDEX, number)), move))
    return builder.insert_value(prefetching, further, 0)


def prefetching_from(builder: Any, prefetching: Any, step: Any) -> Any:
    """Return the prefetch descriptor as seen from this step on, which becomes the first."""
    ahead, move, switch, _ = (builder.extract_value(prefetching, i) for i in range(4))
    prefetching = builder.insert_value(prefetching, builder.add(ahead, builder.mul(step, move)), 0)
    return builder.insert_value(prefetching, builder.sub(switch, step), 2)


def _tile(rows: int, vectors: int) -> Any:
    """Make an intrinsic `tile(inputs, like, first_row, panel_address, prefetching, out)`.

    out[r, lane] = inputs[first_row + r] . panel, with prefetching as `prefetching` says.
    """

    @intrinsic
    def tile(typing: Any, inputs: Any, like: Any, first_row: Any, panel: Any, prefetching: Any, out: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            operand = Operand(context, builder, signature.args[0], args[0], args[2], signature.args[1])
            address = builder.inttoptr(args[3], WORD.as_pointer())
            steps = operand.steps
            parts = operand.parts
            for number, group in enumerate(register_groups(rows, vectors)):
                nothing = [ir.Constant(FLOATS, [0.0] * LANES)] * (rows * len(group))
                fetch = fetch_panel(builder, address, group, operand.by_halves)
                prefetching = prefetching_of(builder, args[4], number, steps)
                words = operand.words
                stride = operand.stride
                totals = emit_products(
                    builder, rows, operand.step, words, stride, steps, fetch, nothing, prefetching, parts
                )
                first = ir.Constant(INDEX, 0)
                store_sums(context, builder, signature.args[5], args[5], first, group[0], rows, totals)
            return context.get_dummy_value()

        return types.void(inputs, like, types.int64, types.int64, PREFETCH, out), codegen

    return tile


_wide_1, _wide_2, _wide_3, _wide_4, _wide_5, _wide_6 = (_tile(rows, 4) for rows in range(1, TILE_ROWS + 1))
_half_1, _half_2, _half_3, _half_4, _half_5, _half_6 = (_tile(rows, 2) for rows in range(1, TILE_ROWS + 1))


@njit(nogil=True, cache=True)
def multiply_panel(inputs: Any, like: Any, first_row: int, rows: int, panel: int, prefetching: Any, out: Any) -> None:
    """Compute out[r, :PANEL] = inputs[first_row + r] . panel for up to TILE_ROWS rows.

    `inputs` are C-contiguous, of `operand_dtype`, as wide as the panel has steps; `panel` is the address of weights of
    the element type of `like`: uint16 (bfloat16's bits), int16 (float16's) or float32. Each step prefetches STEP_BYTES
    of memory where `prefetching` says (PREFETCH).
    """
    if rows == 1:
        _wide_1(inputs, like, first_row, panel, prefetching, out)
    elif rows == 2:
        _wide_2(inputs, like, first_row, panel, prefetching, out)
    elif rows == 3:
        _wide_3(inputs, like, first_row, panel, prefetching, out)
    elif rows == 4:
        _wide_4(inputs, like, first_row, panel, prefetching, out)
    elif rows == 5:
        _wide_5(inputs, like, first_row, panel, prefetching, out)
    else:
        _wide_6(inputs, like, first_row, panel, prefetching, out)


@njit(nogil=True, cache=True)
def multiply_half_panel(
    inputs: Any, like: Any, first_row: int, rows: int, panel: int, prefetching: Any, out: Any
) -> None:
    """Compute out[r, : PANEL // 2] = inputs[first_row + r] . the half panel at the address `panel`, as
    `multiply_panel`."""
    if rows == 1:
        _half_1(inputs, like, first_row, panel, prefetching, out)
    elif rows == 2:
        _half_2(inputs, like, first_row, panel, prefetching, out)
    elif rows == 3:
        _half_3(inputs, like, first_row, panel, prefetching, out)
    elif rows == 4:
        _half_4(inputs, like, first_row, panel, prefetching, out)
    elif rows == 5:
        _half_5(inputs, like, first_row, panel, prefetching, out)
    else:
        _half_6(inputs, like, first_row, panel, prefetching, out)
