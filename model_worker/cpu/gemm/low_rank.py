"""Low-rank products that adapters add to those of a model's weights: tile += x A' B' for the rows of each adapter.

x A' is computed before the product with the weights, for all of its outputs at once; its product with B is added to
each tile of that, before anything else is done with it. Knows adapters as tables of addresses; dot_low_rank.py
describes what lies there. Does not know models. Indices are not checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from model_worker.cpu.gemm.weight_format import HALF, LANE_BYTES, PANEL
from model_worker.cpu.gemm.word_format import word_panel_at, word_steps
from model_worker.cpu.simd.dot_bf16 import STEP_BYTES
from model_worker.cpu.simd.dot_low_rank import HEADER_BYTES, RANKS, add_panel, multiply_ranks
from model_worker.cpu.simd.elements import INSIDE, carray, pointer, widened

# Columns of the tables. Of inputs: the address of A's blocks, and their number.
BLOCKS, COUNT, INPUT_COLUMNS = range(3)
# Of outputs: the address of B's panels, the first column of x A' that they take, their steps, and the address of a
# float32 factor for each output, or 0. Without panels the adapter leaves these outputs as they are.
PANELS, COLUMN, STEPS, GAINS, OUTPUT_COLUMNS = range(5)
# Columns of the table of embeddings: the address of a line that begins with the scale, then A' [vocabulary, ranks], the
# address of B's panels, and their steps. Without steps the adapter leaves embeddings as they are.
VECTORS, EMBEDDING_PANELS, EMBEDDING_STEPS, EMBEDDING_COLUMNS = range(4)
# Bytes in a line of memory.
LINE_BYTES = 64


class LowRank(NamedTuple):
    """The adapters of some rows, at one linear layer."""

    slots: NDArray[np.int64]  # [rows]: index of the row's adapter in the table; -1: none. Or nothing: no row has one
    ranks: NDArray[np.float32]  # [rows, columns]: x A'
    table: NDArray[np.int64]  # [adapters, OUTPUT_COLUMNS]
    like: NDArray[Any]  # any array of the element type of A and B: uint16 stands for bfloat16


@njit(nogil=True, cache=True, **INSIDE)
def _alike(slots: Any, row: int, end: int) -> int:
    """Return how many rows from `row` on, but before `end`, have the same adapter."""
    count = 1
    while row + count < end and slots[row + count] == slots[row]:
        count += 1
    return count


@njit(nogil=True, cache=True, **INSIDE)
def fill_ranks(taken: Any, operand: Any, slots: Any, table: Any, like: Any, ranks: Any) -> None:
    """Compute ranks = operand . A' for the rows that have an adapter.

    `taken` are the pieces to compute: the first, and their number. A piece is a row's product with one block; those of
    a block are neighbours. `table` is [adapters, INPUT_COLUMNS].
    """
    rows = len(slots)
    piece = taken[0]
    end = taken[0] + taken[1]
    size = word_steps(operand, like) * RANKS * LANE_BYTES + HEADER_BYTES
    while piece < end:
        block = piece // rows
        row = piece % rows
        count = _alike(slots, row, min(rows, row + end - piece))
        slot = slots[row]
        if slot >= 0 and block < table[slot, COUNT]:
            address = table[slot, BLOCKS] + block * size
            multiply_ranks(operand, like, row, count, address, ranks, block * RANKS)
        piece += count


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def add_low_rank(adapters: Any, first: int, rows: int, unit: int, whole: bool, tile: Any) -> None:
    """Add what adapters add to a tile: of rows from `first` on, and of the panel, or half panel, number `unit`."""
    slots = adapters.slots
    if len(slots) == 0:
        return
    row = first
    end = first + rows
    while row < end:
        count = _alike(slots, row, end)
        slot = slots[row]
        if slot >= 0 and adapters.table[slot, PANELS] != 0:
            steps = adapters.table[slot, STEPS]
            panel = word_panel_at(steps, adapters.table[slot, PANELS], unit)
            column = adapters.table[slot, COLUMN]
            to = row - first
            add_panel(adapters.ranks, adapters.like, row, count, column, steps, panel, whole, tile, to)
            gains = adapters.table[slot, GAINS]
            if gains != 0:
                lanes = PANEL if whole else HALF
                factors = carray(pointer(gains + unit * HALF * LANE_BYTES), (PANEL,), np.float32)
                for r in range(to, to + count):
                    sums = tile[r]
                    for lane in range(lanes):
                        sums[lane] *= factors[lane]
        row += count


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def add_embedding(slot: int, table: Any, like: Any, token: int, x: Any, tile: Any, scratch: Any) -> None:
    """Add to the embedding x of a token what its adapter adds. `scratch` has the form of a tile, and is written to."""
    steps = table[slot, EMBEDDING_STEPS]
    if steps == 0:
        return
    held = LANE_BYTES // like.itemsize
    ranks = steps * held
    begin = table[slot, VECTORS]
    scale = carray(pointer(begin), (1,), np.float32)[0]
    vector = carray(pointer(begin + LINE_BYTES + token * ranks * like.itemsize), (ranks,), like.dtype)
    panels = table[slot, EMBEDDING_PANELS]
    for first in range(0, ranks, PANEL):
        count = min(PANEL, ranks - first)
        for c in range(count):
            scratch[0, c] = widened(vector[first + c]) * scale
        for number in range(-(-len(x) // PANEL)):
            for lane in range(PANEL):
                tile[0, lane] = np.float32(0.0)
            panel = panels + (number * steps + first // held) * STEP_BYTES
            add_panel(scratch, like, 0, 1, 0, count // held, panel, True, tile, 0)
            to = x[number * PANEL : min(number * PANEL + PANEL, len(x))]
            for lane in range(len(to)):
                to[lane] += tile[0, lane]
