"""Products of a few or many rows with packed weights, shared out to the cores of a team, and what follows each of them.

Knows the two kinds of panels: those of linears.py, whose words are float32 or bfloat16, and the int8 ones of
int8_linear.py, which begin with their scales. `digits` say which kind it is: None, or for int8 panels the rows of the
operand as this core has split them (`prepare`). Sums are float32 in the end. Does not know what is multiplied. Indices
are not checked.
"""

from __future__ import annotations

from typing import Any

import numba.extending
import numpy as np
from numba import njit, types

from model_worker.attention.cpu_kernel import _exp
from model_worker.fusion.digits import Digits, digits_of, split, width_of
from model_worker.fusion.elements import INSIDE, element
from model_worker.fusion.int8_tile import int8_rows, multiply_int8_half_panel, multiply_int8_panel
from model_worker.fusion.largest import take_largest
from model_worker.fusion.team import begin, take, wait, was_last
from model_worker.fusion.tile import (
    EARLY_BYTES,
    PIECE_ROWS,
    STEP_BYTES,
    TILE_ROWS,
    groups_of,
    multiply_half_panel,
    multiply_panel,
)

overload: Any = numba.extending.overload

_MATH = {"reassoc", "contract", "arcp", "nsz"}
PANEL, HALF, LANE_BYTES = 64, 32, 4
SCALE_BYTES = PANEL * LANE_BYTES
"""What an int8 panel begins with: a float32 for each output."""
HALVES = 2
"""Of a panel. They are the pieces of most products; a core takes whole panels, but of the last one a half."""
HEAD_PANELS = 8
"""Panels of the longest product, whose pieces they are, that a core takes at a time: some tens of microseconds."""


@njit(nogil=True, cache=True, **INSIDE)
def prepare(fresh: bool, operand: Any, digits: Any) -> None:
    """Split the operand of a product with int8 weights, where that is not done yet."""
    if digits is None:
        return
    if fresh:
        split(operand, digits)


@njit(nogil=True, cache=True, **INSIDE)
def _steps(operand: Any, digits: Any) -> Any:
    """Of each panel of weights as wide as the operand."""
    if digits is None:
        return operand.shape[1] * operand.itemsize // LANE_BYTES
    return width_of(operand.shape[1]) // LANE_BYTES


@njit(nogil=True, cache=True, **INSIDE)
def _panel(operand: Any, panels: int, unit: int, digits: Any) -> Any:
    """Addresses of half panel number `unit`, and of its scales if it has any."""
    size, half = _steps(operand, digits) * STEP_BYTES, (unit % HALVES) * HALF * LANE_BYTES
    if digits is None:
        place = panels + (unit // HALVES) * size + half
        return place, place
    scales = panels + (unit // HALVES) * (SCALE_BYTES + size) + half
    return scales + SCALE_BYTES, scales


@njit(nogil=True, cache=True, **INSIDE)
def pieces_of_rows(rows: int, operand: Any, digits: Any) -> Any:
    """Into how many pieces rows are cut: so few rows in each that their sums stay in registers."""
    return -(-rows // (PIECE_ROWS if digits is None else int8_rows(operand)))


@njit(nogil=True, cache=True, **INSIDE)
def _piece(rows: int, pieces: int, piece: int) -> Any:
    """The first row of a piece, and how many it has."""
    first = rows * piece // pieces
    return first, rows * (piece + 1) // pieces - first


def digits_at(digits: Any, core: int) -> Any:
    """A core's own digits, or None of None; for compiled callers, whose types must not leave open which."""
    return None if digits is None else Digits(*(array[core] for array in digits))


@overload(digits_at)
def _digits_at(digits: Any, core: int) -> Any:
    def none(digits: Any, core: int) -> Any:
        return None

    def one(digits: Any, core: int) -> Any:
        return Digits(digits.values[core], digits.starts[core], digits.factors[core])

    return none if digits is types.none else one


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
def _early(steps: int, place: Any, following: Any, pieces: int, piece: int, groups: int) -> Any:
    """What to ask memory for while a piece is multiplied, as tile.EARLY; in `groups` it goes through its panel.

    Pieces that wait for memory ask for what is a little further on: in their panel, then in the one at `following`.
    Where each goes through its panel more than once, and from three pieces on, most find it in a cache: so that memory
    does not wait meanwhile, each asks for its share of the panel at `following`.
    """
    if pieces <= 2 and groups == 1:
        ahead = min(EARLY_BYTES // STEP_BYTES, steps)
        return place + ahead * STEP_BYTES, STEP_BYTES, steps - ahead, following - place - steps * STEP_BYTES
    stride = STEP_BYTES // (pieces * groups) + 1
    return following + piece * groups * steps * stride, stride, steps, 0


@njit(nogil=True, cache=True, **INSIDE)
def _groups(many: int, operand: Any, whole: bool, digits: Any) -> Any:
    """How often a piece of so many rows goes through its panel."""
    return groups_of(many if digits is None else many * digits_of(operand), whole)


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _multiply(operand: Any, digits: Any, first: int, rows: int, panel: Any, whole: bool, early: Any, tile: Any) -> None:
    """tile[r] = operand[first + r] . what `_panel` has found."""
    place, scales = panel
    if digits is None:
        if whole:
            multiply_panel(operand, first, rows, place, early, tile)
        else:
            multiply_half_panel(operand, first, rows, place, early, tile)
    elif whole:
        multiply_int8_panel(operand, digits, first, rows, place, scales, early, tile)
    else:
        multiply_int8_half_panel(operand, digits, first, rows, place, scales, early, tile)


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
    digits: Any,
    tile: Any,
) -> None:
    """out[:, column : column + width] = operand . weights + biases[layer], or += operand . weights for layer -1.

    Of the weights' outputs those of the panels' halves that are `taken`: the first, and how many.
    """
    rows, unit, end = out.shape[0], taken[0], min(taken[0] + taken[1], -(-width // HALF))
    pieces, steps = pieces_of_rows(rows, operand, digits), _steps(operand, digits)
    while unit < end:
        whole = unit % HALVES == 0 and unit + 1 < end
        lanes = min(PANEL if whole else HALF, width - unit * HALF)
        panel, at = _panel(operand, panels, unit, digits), column + unit * HALF
        following = _panel(operand, panels, _following(unit, taken, halves_of(width), core), digits)[0]
        for piece in range(pieces):
            first, many = _piece(rows, pieces, piece)
            groups = _groups(many, operand, whole, digits)
            early = _early(steps, panel[0], following, pieces, piece, groups)
            _multiply(operand, digits, first, many, panel, whole, early, tile)
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


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def head_product(
    operand: Any, rows: int, piece: int, digits: Any, panels: int, number: int, after: int, tile: Any
) -> Any:
    """tile[r] = operand[first + r] . lm_head's panel with this number, of one piece: returns its first row, how many.

    The panel `after` is the one that this core multiplies next.
    """
    pieces, steps = pieces_of_rows(rows, operand, digits), _steps(operand, digits)
    first, many = _piece(rows, pieces, piece)
    panel = _panel(operand, panels, HALVES * number, digits)
    following = _panel(operand, panels, HALVES * after, digits)[0]
    early = _early(steps, panel[0], following, pieces, piece, _groups(many, operand, True, digits))
    _multiply(operand, digits, first, many, panel, True, early, tile)
    return first, many


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
    digits: Any,
    tile: Any,
    bits: Any,
) -> None:
    """The largest of each row of operand . weights, as `take_largest` keeps it; wanted rows whole, in out[wanted[row]].

    Of the panels in `numbers` those that are `taken`: the first, and how many. `wanted` int64 [rows] is negative for
    rows of which nothing but the largest matters; `bits` is the tile as int32.
    """
    rows, width = len(wanted), out.shape[1]
    for index in range(taken[0], taken[0] + taken[1]):
        number, after = numbers[index], numbers[min(index + 1, len(numbers) - 1)]
        at = number * PANEL
        lanes = min(PANEL, width - at)
        for piece in range(pieces_of_rows(rows, operand, digits)):
            first, many = head_product(operand, rows, piece, digits, panels, number, after, tile)
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
    digits: Any,
    tile: Any,
    other: Any,
) -> None:
    """out = silu(operand . gate) * (operand . up), as the operand of the next product; of outputs as `add_product`."""
    rows, unit, end = out.shape[0], taken[0], min(taken[0] + taken[1], -(-width // HALF))
    pieces, steps, one = pieces_of_rows(rows, operand, digits), _steps(operand, digits), np.float32(1.0)
    while unit < end:
        whole, at = unit % HALVES == 0 and unit + 1 < end, unit * HALF
        lanes = min(PANEL if whole else HALF, width - at)
        following = _following(unit, taken, halves_of(width), core)
        gate_panel, gate_following = _panel(operand, gate, unit, digits), _panel(operand, gate, following, digits)[0]
        up_panel, up_following = _panel(operand, up, unit, digits), _panel(operand, up, following, digits)[0]
        for piece in range(pieces):
            first, many = _piece(rows, pieces, piece)
            groups = _groups(many, operand, whole, digits)
            early = _early(steps, gate_panel[0], gate_following, pieces, piece, groups)
            _multiply(operand, digits, first, many, gate_panel, whole, early, tile)
            early = _early(steps, up_panel[0], up_following, pieces, piece, groups)
            _multiply(operand, digits, first, many, up_panel, whole, early, other)
            for r in range(many):
                to, gates, values = out[first + r, at : at + lanes], tile[r], other[r]
                for lane in range(len(to)):
                    x = gates[lane]
                    to[lane] = element(x / (one + _exp(-x)) * values[lane], out)
        unit += HALVES if whole else 1


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def _product(core: int, taken: Any, operand: Any, panels: int, bias: Any, out: Any, digits: Any, tile: Any) -> None:
    """out = operand . weights + bias as elements of `out`; a bias of length 0 is none. Outputs as `add_product`."""
    rows, width = out.shape
    unit, end = taken[0], min(taken[0] + taken[1], -(-width // HALF))
    pieces, steps = pieces_of_rows(rows, operand, digits), _steps(operand, digits)
    while unit < end:
        whole, at = unit % HALVES == 0 and unit + 1 < end, unit * HALF
        lanes = min(PANEL if whole else HALF, width - at)
        panel = _panel(operand, panels, unit, digits)
        following = _panel(operand, panels, _following(unit, taken, halves_of(width), core), digits)[0]
        for piece in range(pieces):
            first, many = _piece(rows, pieces, piece)
            groups = _groups(many, operand, whole, digits)
            early = _early(steps, panel[0], following, pieces, piece, groups)
            _multiply(operand, digits, first, many, panel, whole, early, tile)
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
    core: int, _turns: int, counter: Any, cores: int, operand: Any, panels: int, bias: Any, out: Any, digits: Any
) -> None:
    """One core's part of a product alone, out = operand . weights + bias as elements of `out`; no bias has length 0.

    `digits` is None, or for int8 weights room for the operand, once for each core.
    """
    tile, own, halves = np.empty((TILE_ROWS, PANEL), np.float32), digits_at(digits, core), halves_of(out.shape[1])
    done = 0
    taken = take(counter, 0, halves, HALVES, core, cores)
    prepare(taken[1] > 0, operand, own)
    while taken[1] > 0:
        _product(core, taken, operand, panels, bias, out, own, tile)
        done += taken[1]
        taken = take(counter, 0, halves, HALVES, core, cores)
    if done > 0 and was_last(counter, done, halves):
        begin(counter, 1)
    else:
        wait(counter, 0)
