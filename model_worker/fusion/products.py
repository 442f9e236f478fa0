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
from model_worker.fusion.elements import element, pointer
from model_worker.fusion.int8_tile import INT8_ROWS, multiply_and_keep, multiply_int8_half_panel, multiply_int8_panel
from model_worker.fusion.largest import take_largest
from model_worker.fusion.team import claim, claimed_after
from model_worker.fusion.tile import EARLY_BYTES, STEP_BYTES, TILE_ROWS, multiply_half_panel, multiply_panel

_numba: Any = numba
carray = _numba.carray
overload: Any = numba.extending.overload

_MATH = {"reassoc", "contract", "arcp", "nsz"}
PANEL, HALF, LANE_BYTES = 64, 32, 4
SCALE_BYTES = PANEL * LANE_BYTES
"""What an int8 panel begins with: a float32 for each output."""
CLAIMED_PANELS = 8
"""Panels that a core takes at a time of a product whose work is claimed: tens of microseconds for one row."""
MOST_NARROW_ROWS = 12
"""With more rows than these, a product widens each int8 panel once."""
_INT8_HALF_BYTES = 2 * HALF


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def _widens(rows: int, room: Any) -> Any:
    """Whether an int8 panel is widened once; for fewer rows, widening it again costs less than keeping it."""
    return room is not None and rows > MOST_NARROW_ROWS


@njit(nogil=True, cache=True)
def _pieces(rows: int, room: Any) -> Any:
    """Into how many pieces rows are cut: so few rows in each that their sums stay in registers."""
    if _widens(rows, room):
        return 1 + -(-(rows - INT8_ROWS) // TILE_ROWS)
    return -(-rows // (TILE_ROWS if room is None else INT8_ROWS))


@njit(nogil=True, cache=True)
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


@njit(error_model="numpy", nogil=True, cache=True)
def _early(operand: Any, place: Any, following: Any, pieces: int, piece: int, room: Any) -> Any:
    """What to ask memory for while a piece is multiplied: an address, and by how much it moves with each step.

    One piece or two wait for memory, and ask for what is a little further on in their panel. Of more, all but the first
    find it in a cache: so that memory does not wait meanwhile, each asks for its share of the panel at `following`.
    """
    if pieces <= 2:
        return place + EARLY_BYTES, STEP_BYTES
    steps = operand.shape[1] * operand.itemsize // LANE_BYTES
    step_bytes = STEP_BYTES if room is None else PANEL * operand.shape[1] // steps
    stride = step_bytes // pieces + 1
    return following + piece * steps * stride, stride


@njit(nogil=True, cache=True)
def _multiply_words(operand: Any, first: int, rows: int, place: Any, whole: bool, early: Any, tile: Any) -> None:
    if whole:
        multiply_panel(operand, first, rows, place, early[0], early[1], tile)
    else:
        multiply_half_panel(operand, first, rows, place, early[0], early[1], tile)


@njit(error_model="numpy", nogil=True, cache=True)
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
            multiply_and_keep(operand, place, whole, room, tile)
        elif whole:
            multiply_int8_panel(operand, first, rows, place, room, tile)
        else:
            multiply_int8_half_panel(operand, first, rows, place, room, tile)
        factors = carray(pointer(scales), (PANEL,), np.float32)[:lanes]
        for r in range(rows):
            sums = tile[r, :lanes]
            for lane in range(len(sums)):
                sums[lane] *= factors[lane]


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def add_product(
    core: int, cores: int, operand: Any, panels: int, width: int, out: Any, column: int, bias: Any, room: Any, tile: Any
) -> None:
    """out[:, column : column + width] = operand . weights + bias, or += where there is no bias to add.

    Each core takes a run of half panels, and so reads its part of the weights once.
    """
    halves, rows = -(-width // HALF), out.shape[0]
    unit, end = halves * core // cores, halves * (core + 1) // cores
    pieces, widens = _pieces(rows, room), _widens(rows, room)
    while unit < end:
        whole = unit % 2 == 0 and unit + 1 < end
        panel, following = _panel(operand, panels, unit, room), _panel(operand, panels, unit // 2 * 2 + 2, room)[0]
        lanes = min(PANEL if whole else HALF, width - unit * HALF)
        at = column + unit * HALF
        for piece in range(pieces):
            first, count = _piece(rows, pieces, piece, room)
            early = _early(operand, panel[0], following, pieces, piece, room)
            _multiply(operand, first, count, widens, panel, whole, early, room, lanes, tile)
            for r in range(count):
                to, sums = out[first + r, at : at + lanes], tile[r]
                if len(bias):
                    added = bias[at : at + lanes]
                    for lane in range(len(to)):
                        to[lane] = sums[lane] + added[lane]
                else:
                    for lane in range(len(to)):
                        to[lane] += sums[lane]
        unit += 2 if whole else 1


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def product(core: int, cores: int, operand: Any, panels: int, bias: Any, out: Any, room: Any, tile: Any) -> None:
    """out = operand . weights + bias as elements of `out`; a bias of length 0 is none."""
    rows, width = out.shape
    halves = -(-width // HALF)
    unit, end = halves * core // cores, halves * (core + 1) // cores
    pieces, widens = _pieces(rows, room), _widens(rows, room)
    while unit < end:
        whole = unit % 2 == 0 and unit + 1 < end
        panel, following = _panel(operand, panels, unit, room), _panel(operand, panels, unit // 2 * 2 + 2, room)[0]
        at = unit * HALF
        lanes = min(PANEL if whole else HALF, width - at)
        for piece in range(pieces):
            first, count = _piece(rows, pieces, piece, room)
            early = _early(operand, panel[0], following, pieces, piece, room)
            _multiply(operand, first, count, widens, panel, whole, early, room, lanes, tile)
            for r in range(count):
                to, sums = out[first + r, at : at + lanes], tile[r]
                if len(bias):
                    added = bias[at : at + lanes]
                    for lane in range(len(to)):
                        to[lane] = element(sums[lane] + added[lane], out)
                else:
                    for lane in range(len(to)):
                        to[lane] = element(sums[lane], out)
        unit += 2 if whole else 1


@njit(error_model="numpy", nogil=True, cache=True)
def pick_product(
    counter: Any,
    claimed: int,
    operand: Any,
    panels: int,
    wanted: Any,
    out: Any,
    keys: Any,
    places: Any,
    room: Any,
    tile: Any,
) -> None:
    """The largest of each row of operand . weights, as `take_largest` keeps it; wanted rows whole, in out[wanted[row]].

    `wanted` int64 [rows] is negative for rows of which nothing but the largest matters. Cores claim a few panels at a
    time: this is the longest of all products, and a core that another process takes away must not hold up the rest.
    """
    rows, width = len(wanted), out.shape[1]
    panel_count, bits = -(-width // PANEL), tile.view(np.int32)
    pieces, widens = _pieces(rows, room), _widens(rows, room)
    unit = claim(counter, claimed) * CLAIMED_PANELS
    while unit < panel_count:
        for number in range(unit, min(unit + CLAIMED_PANELS, panel_count)):
            at = number * PANEL
            lanes = min(PANEL, width - at)
            panel = _panel(operand, panels, 2 * number, room)
            following = _panel(operand, panels, 2 * number + 2, room)[0]
            for piece in range(pieces):
                first, count = _piece(rows, pieces, piece, room)
                early = _early(operand, panel[0], following, pieces, piece, room)
                _multiply(operand, first, count, widens, panel, True, early, room, lanes, tile)
                take_largest(tile, bits, count, lanes, at, keys, places, first)
                for r in range(count):
                    row = wanted[first + r]
                    if row >= 0:
                        to, sums = out[row, at : at + lanes], tile[r]
                        for lane in range(len(to)):
                            to[lane] = sums[lane]
        unit = claim(counter, claimed) * CLAIMED_PANELS


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def gated(
    counter: Any,
    claimed: int,
    cores: int,
    operand: Any,
    gate: int,
    up: int,
    width: int,
    out: Any,
    rooms: Any,
    tile: Any,
    other: Any,
) -> int:
    """out = silu(operand . gate) * (operand . up), as the operand of the next product. Cores claim panels.

    Returns the claims when all is done.
    """
    panels, rows = -(-width // PANEL), out.shape[0]
    one, room, up_room = np.float32(1.0), room_of(rooms, 0), room_of(rooms, 1)
    pieces, widens = _pieces(rows, room), _widens(rows, room)
    number = claim(counter, claimed)
    while number < panels:
        # What comes after a panel must be known before it is done, so one claim is made ahead.
        following = claim(counter, claimed)
        at = number * PANEL
        lanes = min(PANEL, width - at)
        gate_panel = _panel(operand, gate, 2 * number, room)
        up_panel = _panel(operand, up, 2 * number, up_room)
        gate_following = _panel(operand, gate, 2 * following, room)[0]
        up_following = _panel(operand, up, 2 * following, up_room)[0]
        for piece in range(pieces):
            first, count = _piece(rows, pieces, piece, room)
            early = _early(operand, gate_panel[0], gate_following, pieces, piece, room)
            _multiply(operand, first, count, widens, gate_panel, True, early, room, lanes, tile)
            early = _early(operand, up_panel[0], up_following, pieces, piece, up_room)
            _multiply(operand, first, count, widens, up_panel, True, early, up_room, lanes, other)
            for r in range(count):
                to, gates, values = out[first + r, at : at + lanes], tile[r], other[r]
                for lane in range(len(to)):
                    x = gates[lane]
                    to[lane] = element(x / (one + _exp(-x)) * values[lane], out)
        number = following
    return claimed_after(claimed, panels, cores)


@njit(nogil=True, cache=True)
def run_product(
    core: int, cores: int, counter: Any, operand: Any, panels: int, bias: Any, out: Any, rooms: Any
) -> None:
    """One core's part of `product` alone. `rooms` [cores, steps, PANEL] need no steps for MOST_NARROW_ROWS rows."""
    tile = np.empty((TILE_ROWS, PANEL), np.float32)
    product(core, cores, operand, panels, bias, out, room_of(rooms, core), tile)
