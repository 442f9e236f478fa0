"""Products of a few or many rows with packed weights, shared out to the cores of a team, and what follows each of them.

Knows the two kinds of panels: those of linears.py, whose words are float32 or bfloat16, and the int8 ones of
int8_linear.py, which begin with their scales. `room` says which kind it is: None, or memory of this core's own for int8
panels that many rows want, which are widened once, while the first few rows are multiplied. Sums are float32. Does not
know what is multiplied. Indices are not checked.
"""

from __future__ import annotations

from typing import Any

import numba
import numba.extending
import numpy as np
from numba import njit, types

from model_worker.attention.cpu_kernel import _exp
from model_worker.fusion.elements import INSIDE, element, pointer
from model_worker.fusion.int8_tile import INT8_ROWS, multiply_and_keep, multiply_int8_half_panel, multiply_int8_panel
from model_worker.fusion.largest import take_largest
from model_worker.fusion.team import begin, take, wait, was_last
from model_worker.fusion.tile import EARLY_BYTES, PIECE_ROWS, STEP_BYTES, TILE_ROWS, multiply_half_panel, multiply_panel

_numba: Any = numba
carray = _numba.carray
overload: Any = numba.extending.overload

_MATH = {"reassoc", "contract", "arcp", "nsz"}
PANEL, HALF, LANE_BYTES = 64, 32, 4
SCALE_BYTES = PANEL * LANE_BYTES
"""What an int8 panel begins with: a float32 for each output."""
HALVES = 2
"""Of a panel. They are the pieces of most products; a core takes whole panels, but of the last one a half."""
HEAD_PANELS = 8
"""Panels of the longest product, whose pieces they are, that a core takes at a time: some tens of microseconds."""
MOST_NARROW_ROWS = 12
"""With more rows than these, a product widens each int8 panel once."""
_INT8_HALF_BYTES = 2 * HALF


@njit(nogil=True, cache=True, **INSIDE)
def _panel(operand: Any, panels: int, unit: int, room: Any) -> Any:
    """Addresses of half panel number `unit`, of weights as wide as the operand, and of its scales if it has any."""
    if room is None:
        steps = operand.shape[1] * operand.itemsize // LANE_BYTES
        place = panels + (unit // 2) * steps * PANEL * LANE_BYTES + (unit % 2) * HALF * LANE_BYTES
        return place, place
    width = operand.shape[1]
    base = panels + (unit // 2) * (SCALE_BYTES + PANEL * width)
    scales, place = base + (unit % 2) * HALF * LANE_BYTES, base + SCALE_BYTES + (unit % 2) * _INT8_HALF_BYTES
    return place, scales


@njit(nogil=True, cache=True, **INSIDE)
def _widens(rows: int, room: Any) -> Any:
    """Whether an int8 panel is widened once; for fewer rows, widening it again costs less than keeping it."""
    return room is not None and rows > MOST_NARROW_ROWS


@njit(nogil=True, cache=True, **INSIDE)
def _pieces(rows: int, room: Any) -> Any:
    """Into how many pieces rows are cut: so few rows in each that their sums stay in registers."""
    if _widens(rows, room):
        return 1 + -(-(rows - INT8_ROWS) // PIECE_ROWS)
    return -(-rows // (PIECE_ROWS if room is None else INT8_ROWS))


@njit(nogil=True, cache=True, **INSIDE)
def _piece(rows: int, pieces: int, piece: int, room: Any) -> Any:
    """The first row of a piece, and how many it has."""
    skipped = 0
    if _widens(rows, room):
        if piece == 0:
            return 0, INT8_ROWS
        skipped, rows, pieces, piece = INT8_ROWS, rows - INT8_ROWS, pieces - 1, piece - 1
    first = rows * piece // pieces
    return skipped + first, rows * (piece + 1) // pieces - first


def room_of(rooms: Any, index: int) -> Any:
    """The room at an index, or None of None; for compiled callers, whose types must not leave open which."""
    return None if rooms is None else rooms[index]


@overload(room_of)
def _room_of(rooms: Any, index: int) -> Any:
    def none(rooms: Any, index: int) -> Any:
        return None

    def one(rooms: Any, index: int) -> Any:
        return rooms[index]

    return none if rooms is types.none else one


@njit(nogil=True, cache=True, **INSIDE)
def halves_of(width: int) -> int:
    """Pieces of a product: halves of panels. The last half may have no output."""
    return HALVES * -(-width // PANEL)


@njit(nogil=True, cache=True, **INSIDE)
def _following(unit: int, taken: Any, halves: int, core: int) -> int:
    """Where this core goes on after the panel of half number `unit`: with what it has `taken`, the first half and how
    many, or where it will most likely take more.
    """
    first, count = taken
    following = unit // HALVES * HALVES + HALVES
    if following >= first + count and core % 2:
        following = (first - 1) // HALVES * HALVES
    return following if 0 <= following < halves else unit


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _early(operand: Any, place: Any, following: Any, pieces: int, piece: int, widens: bool, room: Any) -> Any:
    """What to ask memory for while a piece is multiplied, as tile.EARLY.

    Pieces that wait for memory ask for what is a little further on: in their panel, then in the one at `following`.
    From three pieces on, all but the first find their panel in a cache: so that memory does not wait meanwhile, each
    asks for its share of the panel at `following`.
    """
    steps = operand.shape[1] * operand.itemsize // LANE_BYTES
    step_bytes = STEP_BYTES if room is None else PANEL * operand.shape[1] // steps
    if pieces <= 2 or (room is not None and not (widens and piece > 0)):
        ahead = min(EARLY_BYTES // step_bytes, steps)
        return place + ahead * step_bytes, step_bytes, steps - ahead, following - place - steps * step_bytes
    stride = step_bytes // pieces + 1
    return following + piece * steps * stride, stride, steps, 0


@njit(nogil=True, cache=True, **INSIDE)
def _multiply_words(operand: Any, first: int, rows: int, place: Any, whole: bool, early: Any, tile: Any) -> None:
    if whole:
        multiply_panel(operand, first, rows, place, early, tile)
    else:
        multiply_half_panel(operand, first, rows, place, early, tile)


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _multiply(
    operand: Any,
    first: int,
    rows: int,
    widens: bool,
    panel: Any,
    whole: bool,
    early: Any,
    room: Any,
    lanes: int,
    tile: Any,
) -> None:
    """tile[r, :lanes] = operand[first + r] . what `_panel` has found. The first piece is the one that `widens`."""
    place, scales = panel
    if room is None:
        _multiply_words(operand, first, rows, place, whole, early, tile)
    else:
        if widens and first > 0:
            _multiply_words(operand, first, rows, np.int64(room.ctypes.data), whole, early, tile)
        elif widens:
            multiply_and_keep(operand, place, whole, early, room, tile)
        elif whole:
            multiply_int8_panel(operand, first, rows, place, early, room, tile)
        else:
            multiply_int8_half_panel(operand, first, rows, place, early, room, tile)
        _scale(rows, scales, lanes, tile)


@njit(nogil=True, cache=True, **INSIDE)
def _scale(rows: int, scales: int, lanes: int, tile: Any) -> None:
    factors = carray(pointer(scales), (PANEL,), np.float32)[:lanes]
    for r in range(rows):
        sums = tile[r, :lanes]
        for lane in range(len(sums)):
            sums[lane] *= factors[lane]


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def int8_product(operand: Any, rows: int, panels: int, number: int, count: int, lanes: int, tile: Any) -> None:
    """tile[r, :lanes] = operand[r] . int8 panel `number` of `count`, for up to INT8_ROWS rows."""
    room = np.empty((0, PANEL), np.uint32)  # not needed for so few rows, but it says which kind of panels these are
    place, scales = _panel(operand, panels, HALVES * number, room)
    following = _panel(operand, panels, HALVES * min(number + 1, count - 1), room)[0]
    early = _early(operand, place, following, 1, 0, False, room)
    multiply_int8_panel(operand, 0, rows, place, early, room, tile)
    _scale(rows, scales, lanes, tile)


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
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
    room: Any,
    tile: Any,
) -> None:
    """out[:, column : column + width] = operand . weights + biases[layer], or += operand . weights for layer -1.

    Of the weights' outputs those of the panels' halves that are `taken`: the first, and how many.
    """
    rows, unit, end = out.shape[0], taken[0], min(taken[0] + taken[1], -(-width // HALF))
    pieces, widens = _pieces(rows, room), _widens(rows, room)
    while unit < end:
        whole = unit % HALVES == 0 and unit + 1 < end
        lanes = min(PANEL if whole else HALF, width - unit * HALF)
        panel, at = _panel(operand, panels, unit, room), column + unit * HALF
        following = _panel(operand, panels, _following(unit, taken, halves_of(width), core), room)[0]
        for piece in range(pieces):
            first, many = _piece(rows, pieces, piece, room)
            early = _early(operand, panel[0], following, pieces, piece, widens, room)
            _multiply(operand, first, many, widens, panel, whole, early, room, lanes, tile)
            for r in range(many):
                to, sums = out[first + r, at : at + lanes], tile[r]
                if layer >= 0:
                    added = biases[layer, at : at + lanes]
                    for lane in range(len(to)):
                        to[lane] = sums[lane] + added[lane]
                else:
                    for lane in range(len(to)):
                        to[lane] += sums[lane]
        unit += HALVES if whole else 1


@njit(error_model="numpy", nogil=True, cache=True)
def pick_product(
    taken: Any,
    numbers: Any,
    operand: Any,
    panels: int,
    wanted: Any,
    out: Any,
    keys: Any,
    places: Any,
    room: Any,
    tile: Any,
    bits: Any,
) -> None:
    """The largest of each row of operand . weights, as `take_largest` keeps it; wanted rows whole, in out[wanted[row]].

    Of the panels in `numbers` those that are `taken`: the first, and how many. `wanted` int64 [rows] is negative for
    rows of which nothing but the largest matters; `bits` is the tile as int32.
    """
    rows, width = len(wanted), out.shape[1]
    pieces, widens = _pieces(rows, room), _widens(rows, room)
    for index in range(taken[0], taken[0] + taken[1]):
        number, after = numbers[index], numbers[min(index + 1, len(numbers) - 1)]
        at = number * PANEL
        lanes = min(PANEL, width - at)
        panel = _panel(operand, panels, HALVES * number, room)
        following = _panel(operand, panels, HALVES * after, room)[0]
        for piece in range(pieces):
            first, many = _piece(rows, pieces, piece, room)
            early = _early(operand, panel[0], following, pieces, piece, widens, room)
            _multiply(operand, first, many, widens, panel, True, early, room, lanes, tile)
            take_largest(tile, bits, many, lanes, at, keys, places, first)
            for r in range(many):
                row = wanted[first + r]
                if row >= 0:
                    to, sums = out[row, at : at + lanes], tile[r]
                    for lane in range(len(to)):
                        to[lane] = sums[lane]


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def gated(
    core: int,
    taken: Any,
    operand: Any,
    gate: int,
    up: int,
    width: int,
    out: Any,
    room: Any,
    up_room: Any,
    tile: Any,
    other: Any,
) -> None:
    """out = silu(operand . gate) * (operand . up), as the operand of the next product; of outputs as `add_product`."""
    rows, unit, end = out.shape[0], taken[0], min(taken[0] + taken[1], -(-width // HALF))
    pieces, widens, one = _pieces(rows, room), _widens(rows, room), np.float32(1.0)
    while unit < end:
        whole, at = unit % HALVES == 0 and unit + 1 < end, unit * HALF
        lanes = min(PANEL if whole else HALF, width - at)
        following = _following(unit, taken, halves_of(width), core)
        gate_panel, gate_following = _panel(operand, gate, unit, room), _panel(operand, gate, following, room)[0]
        up_panel, up_following = _panel(operand, up, unit, up_room), _panel(operand, up, following, up_room)[0]
        for piece in range(pieces):
            first, many = _piece(rows, pieces, piece, room)
            early = _early(operand, gate_panel[0], gate_following, pieces, piece, widens, room)
            _multiply(operand, first, many, widens, gate_panel, whole, early, room, lanes, tile)
            early = _early(operand, up_panel[0], up_following, pieces, piece, widens, up_room)
            _multiply(operand, first, many, widens, up_panel, whole, early, up_room, lanes, other)
            for r in range(many):
                to, gates, values = out[first + r, at : at + lanes], tile[r], other[r]
                for lane in range(len(to)):
                    x = gates[lane]
                    to[lane] = element(x / (one + _exp(-x)) * values[lane], out)
        unit += HALVES if whole else 1


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def _product(core: int, taken: Any, operand: Any, panels: int, bias: Any, out: Any, room: Any, tile: Any) -> None:
    """out = operand . weights + bias as elements of `out`; a bias of length 0 is none. Outputs as `add_product`."""
    rows, width = out.shape
    unit, end = taken[0], min(taken[0] + taken[1], -(-width // HALF))
    pieces, widens = _pieces(rows, room), _widens(rows, room)
    while unit < end:
        whole, at = unit % HALVES == 0 and unit + 1 < end, unit * HALF
        lanes = min(PANEL if whole else HALF, width - at)
        panel = _panel(operand, panels, unit, room)
        following = _panel(operand, panels, _following(unit, taken, halves_of(width), core), room)[0]
        for piece in range(pieces):
            first, many = _piece(rows, pieces, piece, room)
            early = _early(operand, panel[0], following, pieces, piece, widens, room)
            _multiply(operand, first, many, widens, panel, whole, early, room, lanes, tile)
            for r in range(many):
                to, sums = out[first + r, at : at + lanes], tile[r]
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
    core: int, _turns: int, counter: Any, cores: int, operand: Any, panels: int, bias: Any, out: Any, rooms: Any
) -> None:
    """One core's part of a product alone, out = operand . weights + bias as elements of `out`; no bias has length 0.

    `rooms` is None, or for int8 weights uint32 [cores, steps, PANEL], without steps for up to MOST_NARROW_ROWS rows.
    """
    tile, room, halves = np.empty((TILE_ROWS, PANEL), np.float32), room_of(rooms, core), halves_of(out.shape[1])
    done = 0
    taken = take(counter, 0, halves, HALVES, core, cores)
    while taken[1] > 0:
        _product(core, taken, operand, panels, bias, out, room, tile)
        done += taken[1]
        taken = take(counter, 0, halves, HALVES, core, cores)
    if done > 0 and was_last(counter, done, halves):
        begin(counter, 1)
    else:
        wait(counter, 0)
