"""Products of a few or many rows with packed weights, shared out to the cores of a thread pool, and their epilogues.

Knows the kinds of panels: those of packed_linear.py, whose words are float32 or bfloat16, their bf12 form (bf12.py),
and the int8 ones of int8_linear.py, which begin with their scales. Sums are float32 in the end. Does not know the
meaning of operands. Indices are not checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from model_worker.cpu.gemm.weight_kind import kind_at, prepare
from model_worker.cpu.simd.argmax import take_argmax
from model_worker.cpu.simd.bf12 import BF12_STEP_BYTES, HEADER_BYTES, bf12_panel_bytes
from model_worker.cpu.simd.dot_bf12 import multiply_bf12_half_panel, multiply_bf12_panel
from model_worker.cpu.simd.dot_bf16 import (
    PIECE_ROWS,
    PREFETCH_BYTES,
    SHARING_PIECES,
    STEP_BYTES,
    TILE_ROWS,
    groups_of,
    multiply_half_panel,
    multiply_panel,
)
from model_worker.cpu.simd.dot_int8 import int8_rows, multiply_int8_half_panel, multiply_int8_panel
from model_worker.cpu.simd.elements import INSIDE, MATH, element, exp
from model_worker.cpu.simd.fixed_point import digits_of, width_of
from model_worker.cpu.threads import arrived_last, begin, take, wait

PANEL = 64
HALF = 32
LANE_BYTES = 4
# Bytes of scales at the beginning of an int8 panel: a float32 for each output.
SCALE_BYTES = PANEL * LANE_BYTES
# Halves of a panel: the pieces of most products; a core takes whole panels, but of the last one a half.
HALVES = 2
# Panels of lm_head, the longest product, whose pieces they are, that a core takes at a time: some tens of microseconds.
HEAD_PANELS = 8


@njit(nogil=True, cache=True, **INSIDE)
def _steps(operand: Any, like: Any, digits: Any) -> Any:
    """Return the steps of each panel of weights as wide as the operand."""
    if digits is None:
        return operand.shape[1] * like.itemsize // LANE_BYTES
    return width_of(operand.shape[1]) // LANE_BYTES


@njit(nogil=True, cache=True, **INSIDE)
def _is_bf12(bf12: Any) -> bool:
    if bf12 is None:
        return False
    return bf12  # type: ignore[no-any-return]


@njit(nogil=True, cache=True, **INSIDE)
def _find_panel(operand: Any, panels: int, unit: int, like: Any, digits: Any, bf12: Any) -> Any:
    steps = _steps(operand, like, digits)
    half = (unit % HALVES) * HALF * LANE_BYTES
    size = steps * STEP_BYTES
    if digits is None:
        if _is_bf12(bf12):
            return panels + (unit // HALVES) * bf12_panel_bytes(steps), np.int64(unit % HALVES)
        place = panels + (unit // HALVES) * size + half
        return place, place
    scales = panels + (unit // HALVES) * (SCALE_BYTES + size) + half
    return scales + SCALE_BYTES, scales


@njit(nogil=True, cache=True, **INSIDE)
def _panel(operand: Any, panels: int, unit: int, kind: Any) -> Any:
    """Return the addresses of half panel number `unit`, and of its scales if it has any.

    For a bf12 panel: the address of the panel that it is half of, and which half.
    """
    return _find_panel(operand, panels, unit, kind.like, kind.digits, kind.bf12)


@njit(nogil=True, cache=True, **INSIDE)
def _piece_rows(like: Any, digits: Any) -> Any:
    if digits is None:
        return PIECE_ROWS
    return int8_rows(like)


@njit(nogil=True, cache=True, **INSIDE)
def pieces_of_rows(rows: int, kind: Any) -> Any:
    """Return the number of pieces into which rows are cut: so few rows in each that their sums stay in registers."""
    return -(-rows // _piece_rows(kind.like, kind.digits))


@njit(nogil=True, cache=True, **INSIDE)
def _piece(rows: int, pieces: int, piece: int) -> Any:
    """Return the first row of a piece, and its number of rows."""
    first = rows * piece // pieces
    return first, rows * (piece + 1) // pieces - first


@njit(nogil=True, cache=True, **INSIDE)
def halves_of(width: int) -> int:
    """Return the pieces of a product: halves of panels. The last half may have no output."""
    return HALVES * -(-width // PANEL)


@njit(nogil=True, cache=True, **INSIDE)
def _following(unit: int, taken: Any, halves: int, core: int) -> int:
    """Return the half where this core goes on after the panel of half number `unit`.

    It is one of those `taken`, the first half and their number, or one that the core will most likely take next.
    """
    first, count = taken
    following = unit // HALVES * HALVES + HALVES
    if following >= first + count and core % 2:
        following = (first - 1) // HALVES * HALVES
    return following if 0 <= following < halves else unit


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _loops(many: int, whole: bool, like: Any, digits: Any) -> Any:
    """Return how often a piece of `many` rows goes through its panel."""
    if digits is None:
        return groups_of(many, whole)
    return groups_of(many * digits_of(like), whole)


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _prefetching(
    many: int, whole: bool, operand: Any, kind: Any, place: Any, following: Any, pieces: int, piece: int
) -> Any:
    """Describe what to prefetch while a piece with `many` of the rows is multiplied, as dot_bf16.PREFETCH.

    Pieces that are bound by memory prefetch from a little further on: in their panel, then in the one at `following`.
    Where each goes through its panel more than once, and where they are many, most find it in a cache: so that memory
    is not idle meanwhile, each prefetches its share of the panel at `following`.
    """
    steps = _steps(operand, kind.like, kind.digits)
    groups = _loops(many, whole, kind.like, kind.digits)
    header, step_bytes = (HEADER_BYTES, BF12_STEP_BYTES) if _is_bf12(kind.bf12) else (0, STEP_BYTES)
    size = header + steps * step_bytes
    if pieces < SHARING_PIECES and groups == 1:
        ahead = min(PREFETCH_BYTES // step_bytes, steps)
        return place + header + ahead * step_bytes, step_bytes, steps - ahead, following - place - size
    stride = size // (pieces * groups * steps) + 1
    return following + piece * groups * steps * stride, stride, steps, 0


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _multiply_bf12(
    operand: Any, like: Any, bf12: Any, first: int, rows: int, panel: Any, whole: bool, prefetching: Any, tile: Any
) -> bool:
    """Multiply by the panel if it is a bf12 one; return whether it was."""
    if bf12 is None:
        return False
    if not bf12:
        return False
    place, half = panel
    if whole:
        multiply_bf12_panel(operand, like, first, rows, place, prefetching, tile)
    else:
        multiply_bf12_half_panel(operand, like, first, rows, place, half, prefetching, tile)
    return True


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _multiply_piece(
    operand: Any, kind: Any, digits: Any, first: int, rows: int, panel: Any, whole: bool, prefetching: Any, tile: Any
) -> None:
    place, scales = panel
    if digits is None:
        if _multiply_bf12(operand, kind.like, kind.bf12, first, rows, panel, whole, prefetching, tile):
            return
        if whole:
            multiply_panel(operand, kind.like, first, rows, place, prefetching, tile)
        else:
            multiply_half_panel(operand, kind.like, first, rows, place, prefetching, tile)
    elif whole:
        multiply_int8_panel(kind.like, digits, operand.shape[1], first, rows, place, scales, prefetching, tile)
    else:
        multiply_int8_half_panel(kind.like, digits, operand.shape[1], first, rows, place, scales, prefetching, tile)


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _multiply(
    operand: Any, kind: Any, first: int, rows: int, panel: Any, whole: bool, prefetching: Any, tile: Any
) -> None:
    """Compute tile[r] = operand[first + r] . the panel of `_panel`."""
    _multiply_piece(operand, kind, kind.digits, first, rows, panel, whole, prefetching, tile)


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def add_product(
    core: int,
    taken: Any,
    operand: Any,
    panels: int,
    width: int,
    out: Any,
    column: int,
    biases: Any,
    layer: int,
    kind: Any,
    tile: Any,
) -> None:
    """Compute out[:, column : column + width] = operand . weights + biases[layer], or += operand . weights for layer
    -1.

    `taken` are the halves of the weights' panels to multiply: the first, and their number.
    """
    rows = out.shape[0]
    unit = taken[0]
    end = min(taken[0] + taken[1], -(-width // HALF))
    pieces = pieces_of_rows(rows, kind)
    while unit < end:
        whole = unit % HALVES == 0 and unit + 1 < end
        lanes = min(PANEL if whole else HALF, width - unit * HALF)
        panel = _panel(operand, panels, unit, kind)
        at = column + unit * HALF
        following = _panel(operand, panels, _following(unit, taken, halves_of(width), core), kind)[0]
        for piece in range(pieces):
            first, many = _piece(rows, pieces, piece)
            prefetching = _prefetching(many, whole, operand, kind, panel[0], following, pieces, piece)
            _multiply(operand, kind, first, many, panel, whole, prefetching, tile)
            for r in range(many):
                to = out[first + r, at : at + lanes]
                sums = tile[r]
                if layer >= 0:
                    added = biases[layer, at : at + lanes]
                    for lane in range(len(to)):
                        to[lane] = sums[lane] + added[lane]
                else:
                    for lane in range(len(to)):
                        to[lane] += sums[lane]
        unit += HALVES if whole else 1


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def head_product(
    operand: Any, rows: int, piece: int, kind: Any, panels: int, number: int, after: int, tile: Any
) -> Any:
    """Compute tile[r] = operand[first + r] . lm_head's panel `number`, for one piece. Returns its first row, and its
    rows.

    The panel `after` is the one that this core multiplies next.
    """
    pieces = pieces_of_rows(rows, kind)
    first, many = _piece(rows, pieces, piece)
    panel = _panel(operand, panels, HALVES * number, kind)
    following = _panel(operand, panels, HALVES * after, kind)[0]
    prefetching = _prefetching(many, True, operand, kind, panel[0], following, pieces, piece)
    _multiply(operand, kind, first, many, panel, True, prefetching, tile)
    return first, many


@njit(error_model="numpy", nogil=True, cache=True)
def argmax_product(
    taken: Any,
    numbers: Any,
    operand: Any,
    panels: int,
    wanted: Any,
    out: Any,
    keys: Any,
    places: Any,
    kind: Any,
    tile: Any,
    bits: Any,
) -> None:
    """Keep the argmax of each row of operand . weights as `take_argmax` does; wanted rows go to out[wanted[row]] whole.

    `taken` are the panels in `numbers` to multiply: the first, and their number. `wanted` int64 [rows] is negative for
    rows that need nothing but the argmax; `bits` is the tile as int32.
    """
    rows = len(wanted)
    width = out.shape[1]
    for index in range(taken[0], taken[0] + taken[1]):
        number = numbers[index]
        after = numbers[min(index + 1, len(numbers) - 1)]
        at = number * PANEL
        lanes = min(PANEL, width - at)
        for piece in range(pieces_of_rows(rows, kind)):
            first, many = head_product(operand, rows, piece, kind, panels, number, after, tile)
            take_argmax(tile, bits, many, lanes, at, keys, places, first)
            for r in range(many):
                row = wanted[first + r]
                if row >= 0:
                    to = out[row, at : at + lanes]
                    sums = tile[r]
                    for lane in range(len(to)):
                        to[lane] = sums[lane]


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def gated(
    core: int,
    taken: Any,
    operand: Any,
    gate: int,
    up: int,
    width: int,
    out: Any,
    kind: Any,
    tile: Any,
    other: Any,
) -> None:
    """Compute out = silu(operand . gate) * (operand . up), as the operand of the next product; outputs as
    `add_product`."""
    rows = out.shape[0]
    unit = taken[0]
    end = min(taken[0] + taken[1], -(-width // HALF))
    pieces = pieces_of_rows(rows, kind)
    one = np.float32(1.0)
    while unit < end:
        whole = unit % HALVES == 0 and unit + 1 < end
        at = unit * HALF
        lanes = min(PANEL if whole else HALF, width - at)
        following = _following(unit, taken, halves_of(width), core)
        gate_panel = _panel(operand, gate, unit, kind)
        gate_following = _panel(operand, gate, following, kind)[0]
        up_panel = _panel(operand, up, unit, kind)
        up_following = _panel(operand, up, following, kind)[0]
        for piece in range(pieces):
            first, many = _piece(rows, pieces, piece)
            prefetching = _prefetching(many, whole, operand, kind, gate_panel[0], gate_following, pieces, piece)
            _multiply(operand, kind, first, many, gate_panel, whole, prefetching, tile)
            prefetching = _prefetching(many, whole, operand, kind, up_panel[0], up_following, pieces, piece)
            _multiply(operand, kind, first, many, up_panel, whole, prefetching, other)
            for r in range(many):
                to = out[first + r, at : at + lanes]
                gates = tile[r]
                values = other[r]
                for lane in range(len(to)):
                    x = gates[lane]
                    to[lane] = element(x / (one + exp(-x)) * values[lane], out)
        unit += HALVES if whole else 1


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def _product(core: int, taken: Any, operand: Any, panels: int, bias: Any, out: Any, kind: Any, tile: Any) -> None:
    """Compute out = operand . weights + bias as elements of `out`; a bias of length 0 is none. Outputs as
    `add_product`."""
    rows, width = out.shape
    unit = taken[0]
    end = min(taken[0] + taken[1], -(-width // HALF))
    pieces = pieces_of_rows(rows, kind)
    while unit < end:
        whole = unit % HALVES == 0 and unit + 1 < end
        at = unit * HALF
        lanes = min(PANEL if whole else HALF, width - at)
        panel = _panel(operand, panels, unit, kind)
        following = _panel(operand, panels, _following(unit, taken, halves_of(width), core), kind)[0]
        for piece in range(pieces):
            first, many = _piece(rows, pieces, piece)
            prefetching = _prefetching(many, whole, operand, kind, panel[0], following, pieces, piece)
            _multiply(operand, kind, first, many, panel, whole, prefetching, tile)
            for r in range(many):
                to = out[first + r, at : at + lanes]
                sums = tile[r]
                if len(bias):
                    added = bias[at : at + lanes]
                    for lane in range(len(to)):
                        to[lane] = element(sums[lane] + added[lane], out)
                else:
                    for lane in range(len(to)):
                        to[lane] = element(sums[lane], out)
        unit += HALVES if whole else 1


@njit(nogil=True, cache=True)
def run_product(
    core: int, _turns: int, counter: Any, cores: int, operand: Any, panels: int, bias: Any, out: Any, kind: Any
) -> None:
    """Run one core's part of a product alone, out = operand . weights + bias as elements of `out`; no bias has length
    0.

    The digits of `kind`, if it has any, begin with the core.
    """
    tile = np.empty((TILE_ROWS, PANEL), np.float32)
    own = kind_at(kind, core)
    halves = halves_of(out.shape[1])
    done = 0
    taken = take(counter, 0, halves, HALVES, core, cores)
    prepare(taken[1] > 0, operand, own)
    while taken[1] > 0:
        _product(core, taken, operand, panels, bias, out, own, tile)
        done += taken[1]
        taken = take(counter, 0, halves, HALVES, core, cores)
    if done > 0 and arrived_last(counter, done, halves):
        begin(counter, 1)
    else:
        wait(counter, 0)
