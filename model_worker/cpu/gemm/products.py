"""Products of a few or many rows with packed weights, shared out to the cores of a thread pool, and their epilogues.

Knows panels of 64 outputs, in a format that weight_format.py describes: it finds them and multiplies. Sums are float32
in the end. Does not know any format, nor the meaning of operands. Indices are not checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from model_worker.cpu.gemm.low_rank import add_low_rank
from model_worker.cpu.gemm.weight_format import HALF, HALVES, PANEL
from model_worker.cpu.simd.activations import activate
from model_worker.cpu.simd.argmax import take_argmax
from model_worker.cpu.simd.dot_bf16 import PREFETCH_BYTES, SHARING_PIECES, TILE_ROWS
from model_worker.cpu.simd.elements import INSIDE, MATH, element, exp
from model_worker.cpu.threads import arrived_last, begin, take, wait

# Panels of lm_head, the longest product, whose pieces they are, that a core takes at a time: some tens of microseconds.
HEAD_PANELS = 8


@njit(nogil=True, cache=True, **INSIDE)
def pieces_of_rows(rows: int, weight_format: Any) -> Any:
    """Return the number of pieces into which rows are cut: so few rows in each that their sums stay in registers."""
    return -(-rows // weight_format.piece_rows())


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
def _prefetching(
    many: int, whole: bool, operand: Any, weight_format: Any, panel: Any, following: Any, pieces: int, piece: int
) -> Any:
    """Describe what to prefetch while a piece with `many` of the rows is multiplied, as dot_bf16.PREFETCH.

    Pieces that are bound by memory prefetch from a little further on: in their panel, then in the one at `following`.
    Where each passes over its panel more than once, and where they are many, most find it in a cache: so that memory
    is not idle meanwhile, each prefetches its share of the panel at `following`.
    """
    header, step_bytes, steps = weight_format.layout(operand, panel)
    passes = weight_format.passes(many, whole)
    place = panel[0]
    size = header + steps * step_bytes
    if pieces < SHARING_PIECES and passes == 1:
        ahead = min(PREFETCH_BYTES // step_bytes, steps)
        return place + header + ahead * step_bytes, step_bytes, steps - ahead, following - place - size
    stride = size // (pieces * passes * steps) + 1
    return following + piece * passes * steps * stride, stride, steps, 0


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
    weight_format: Any,
    tile: Any,
    adapters: Any = None,
) -> None:
    """Compute out[:, column : column + width] = operand . weights + biases[layer], or += operand . weights for layer
    -1.

    `taken` are the halves of the weights' panels to multiply: the first, and their number. `adapters` are a `LowRank`
    of the rows, or None.
    """
    rows = out.shape[0]
    unit = taken[0]
    end = min(taken[0] + taken[1], -(-width // HALF))
    pieces = pieces_of_rows(rows, weight_format)
    while unit < end:
        whole = unit % HALVES == 0 and unit + 1 < end
        lanes = min(PANEL if whole else HALF, width - unit * HALF)
        panel = weight_format.panel_at(operand, panels, unit)
        at = column + unit * HALF
        following = weight_format.panel_at(operand, panels, _following(unit, taken, halves_of(width), core))[0]
        for piece in range(pieces):
            first, many = _piece(rows, pieces, piece)
            prefetching = _prefetching(many, whole, operand, weight_format, panel, following, pieces, piece)
            weight_format.multiply(operand, first, many, panel, whole, prefetching, tile)
            if adapters is not None:
                add_low_rank(adapters, first, many, unit, whole, tile)
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
    operand: Any, rows: int, piece: int, weight_format: Any, panels: int, number: int, after: int, tile: Any
) -> Any:
    """Compute tile[r] = operand[first + r] . lm_head's panel `number`, for one piece. Returns its first row, and its
    rows.

    The panel `after` is the one that this core multiplies next.
    """
    pieces = pieces_of_rows(rows, weight_format)
    first, many = _piece(rows, pieces, piece)
    panel = weight_format.panel_at(operand, panels, HALVES * number)
    following = weight_format.panel_at(operand, panels, HALVES * after)[0]
    prefetching = _prefetching(many, True, operand, weight_format, panel, following, pieces, piece)
    weight_format.multiply(operand, first, many, panel, True, prefetching, tile)
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
    weight_format: Any,
    tile: Any,
    bits: Any,
    adapters: Any = None,
) -> None:
    """Keep the argmax of each row of operand . weights as `take_argmax` does; wanted rows go to out[wanted[row]] whole.

    `taken` are the panels in `numbers` to multiply: the first, and their number. `wanted` int64 [rows] is negative for
    rows that need nothing but the argmax; `bits` is the tile as int32; `adapters` as `add_product`.
    """
    rows = len(wanted)
    width = out.shape[1]
    for index in range(taken[0], taken[0] + taken[1]):
        number = numbers[index]
        after = numbers[min(index + 1, len(numbers) - 1)]
        at = number * PANEL
        lanes = min(PANEL, width - at)
        for piece in range(pieces_of_rows(rows, weight_format)):
            first, many = head_product(operand, rows, piece, weight_format, panels, number, after, tile)
            if adapters is not None:
                add_low_rank(adapters, first, many, HALVES * number, True, tile)
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
    weight_format: Any,
    tile: Any,
    other: Any,
    gate_adapters: Any = None,
    up_adapters: Any = None,
) -> None:
    """Compute out = silu(operand . gate) * (operand . up), as the operand of the next product; outputs as
    `add_product`."""
    rows = out.shape[0]
    unit = taken[0]
    end = min(taken[0] + taken[1], -(-width // HALF))
    pieces = pieces_of_rows(rows, weight_format)
    one = np.float32(1.0)
    while unit < end:
        whole = unit % HALVES == 0 and unit + 1 < end
        at = unit * HALF
        lanes = min(PANEL if whole else HALF, width - at)
        following = _following(unit, taken, halves_of(width), core)
        gate_panel = weight_format.panel_at(operand, gate, unit)
        gate_following = weight_format.panel_at(operand, gate, following)[0]
        up_panel = weight_format.panel_at(operand, up, unit)
        up_following = weight_format.panel_at(operand, up, following)[0]
        for piece in range(pieces):
            first, many = _piece(rows, pieces, piece)
            prefetching = _prefetching(many, whole, operand, weight_format, gate_panel, gate_following, pieces, piece)
            weight_format.multiply(operand, first, many, gate_panel, whole, prefetching, tile)
            if gate_adapters is not None:
                add_low_rank(gate_adapters, first, many, unit, whole, tile)
            prefetching = _prefetching(many, whole, operand, weight_format, up_panel, up_following, pieces, piece)
            weight_format.multiply(operand, first, many, up_panel, whole, prefetching, other)
            if up_adapters is not None:
                add_low_rank(up_adapters, first, many, unit, whole, other)
            for r in range(many):
                to = out[first + r, at : at + lanes]
                gates = tile[r]
                values = other[r]
                for lane in range(len(to)):
                    x = gates[lane]
                    to[lane] = element(x / (one + exp(-x)) * values[lane], out)
        unit += HALVES if whole else 1


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def activated_product(
    core: int,
    taken: Any,
    operand: Any,
    gate: int,
    up: int,
    biases: Any,
    activation: int,
    scales: Any,
    out: Any,
    weight_format: Any,
    tile: Any,
    other: Any,
) -> None:
    """Compute out = activation(operand . up + bias) * scales, as the operand of the next product; with a gate,
    activation(operand . gate + bias) * (operand . up + bias) * scales.

    `gate` is 0 without one; `biases` f32 [2, width] are those of the gate and of up. Outputs as `add_product`.
    """
    rows = out.shape[0]
    width = biases.shape[1]
    unit = taken[0]
    end = min(taken[0] + taken[1], -(-width // HALF))
    pieces = pieces_of_rows(rows, weight_format)
    while unit < end:
        whole = unit % HALVES == 0 and unit + 1 < end
        at = unit * HALF
        lanes = min(PANEL if whole else HALF, width - at)
        factors = scales[at : at + lanes]
        panel = weight_format.panel_at(operand, up, unit)
        gate_panel = weight_format.panel_at(operand, gate, unit)
        after = _following(unit, taken, halves_of(width), core)
        following = weight_format.panel_at(operand, up, after)[0]
        gate_following = weight_format.panel_at(operand, gate, after)[0]
        for piece in range(pieces):
            first, many = _piece(rows, pieces, piece)
            prefetching = _prefetching(many, whole, operand, weight_format, panel, following, pieces, piece)
            weight_format.multiply(operand, first, many, panel, whole, prefetching, tile)
            if gate != 0:
                prefetching = _prefetching(
                    many, whole, operand, weight_format, gate_panel, gate_following, pieces, piece
                )
                weight_format.multiply(operand, first, many, gate_panel, whole, prefetching, other)
            for r in range(many):
                _write_activated(
                    tile[r],
                    other[r],
                    biases[0, at : at + lanes],
                    biases[1, at : at + lanes],
                    gate != 0,
                    activation,
                    factors,
                    out[first + r, at : at + lanes],
                )
        unit += HALVES if whole else 1


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _write_activated(
    values: Any, gates: Any, gate_bias: Any, bias: Any, is_gated: bool, activation: int, factors: Any, to: Any
) -> None:
    """Write a row of `activated_product`."""
    if is_gated:
        activate(gates, gate_bias, activation)
        for lane in range(len(to)):
            to[lane] = element((values[lane] + bias[lane]) * gates[lane] * factors[lane], to)
    else:
        activate(values, bias, activation)
        for lane in range(len(to)):
            to[lane] = element(values[lane] * factors[lane], to)


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def _product(
    core: int, taken: Any, operand: Any, panels: int, bias: Any, out: Any, weight_format: Any, tile: Any
) -> None:
    """Compute out = operand . weights + bias as elements of `out`; a bias of length 0 is none. Outputs as
    `add_product`."""
    rows, width = out.shape
    unit = taken[0]
    end = min(taken[0] + taken[1], -(-width // HALF))
    pieces = pieces_of_rows(rows, weight_format)
    while unit < end:
        whole = unit % HALVES == 0 and unit + 1 < end
        at = unit * HALF
        lanes = min(PANEL if whole else HALF, width - at)
        panel = weight_format.panel_at(operand, panels, unit)
        following = weight_format.panel_at(operand, panels, _following(unit, taken, halves_of(width), core))[0]
        for piece in range(pieces):
            first, many = _piece(rows, pieces, piece)
            prefetching = _prefetching(many, whole, operand, weight_format, panel, following, pieces, piece)
            weight_format.multiply(operand, first, many, panel, whole, prefetching, tile)
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
    core: int, counter: Any, cores: int, operand: Any, panels: int, bias: Any, out: Any, weight_format: Any
) -> None:
    """Run one core's part of a product alone, out = operand . weights + bias as elements of `out`; no bias has length
    0.

    The buffers of `weight_format`, if it has any, begin with the core.
    """
    tile = np.empty((TILE_ROWS, PANEL), np.float32)
    own = weight_format.of_core(core)
    halves = halves_of(out.shape[1])
    done = 0
    taken = take(counter, 0, halves, HALVES, core, cores)
    if taken[1] > 0:
        own.prepare(operand)
    while taken[1] > 0:
        _product(core, taken, operand, panels, bias, out, own, tile)
        done += taken[1]
        taken = take(counter, 0, halves, HALVES, core, cores)
    if done > 0 and arrived_last(counter, done, halves):
        begin(counter, 1)
    else:
        wait(counter, 0)
