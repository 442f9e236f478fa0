"""Attention of texts whose tokens all see each other: one head of one text at a time.

The keys of a head become panels (packed_linear.py), as weights are, and so do its values: both products are those of
simd/dot_bf16.py, in float32. A text's scores of a few queries stay in the first-level cache. Indices are not checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from model_worker.cpu.gemm.weight_format import HALF, LANE_BYTES, PANEL
from model_worker.cpu.simd.dot_bf16 import PIECE_ROWS, STEP_BYTES, TILE_ROWS, multiply_half_panel, multiply_panel
from model_worker.cpu.simd.elements import INSIDE, MATH, element, exp

_LEAST = np.float32(-np.inf)


class Scratch(NamedTuple):
    """A core's own memory for the longest text, of L tokens."""

    keys: NDArray[np.float32]  # [panels of L keys * head_dim * PANEL]
    values: NDArray[np.float32]  # [panels of head_dim * L * PANEL]
    queries: NDArray[np.float32]  # [TILE_ROWS, head_dim]
    scores: NDArray[np.float32]  # [TILE_ROWS * L]
    totals: NDArray[np.float32]  # [TILE_ROWS]


@njit(nogil=True, cache=True, **INSIDE)
def scratch_for(longest: int, head_dim: int) -> Any:
    """Make a core's memory for texts of at most `longest` tokens."""
    return Scratch(
        np.zeros(-(-longest // PANEL) * head_dim * PANEL, np.float32),
        np.zeros(-(-head_dim // PANEL) * longest * PANEL, np.float32),
        np.empty((TILE_ROWS, head_dim), np.float32),
        np.empty(TILE_ROWS * longest, np.float32),
        np.empty(TILE_ROWS, np.float32),
    )


@njit(nogil=True, cache=True, **INSIDE)
def _pack(qkv: Any, first: int, length: int, k_column: int, v_column: int, head_dim: int, scratch: Any) -> None:
    """Write the keys and values of a head as panels."""
    for key in range(length):
        row = qkv[first + key]
        panel = scratch.keys[key // PANEL * head_dim * PANEL :]
        lane = key % PANEL
        for d in range(head_dim):
            panel[d * PANEL + lane] = row[k_column + d]
        for part in range(-(-head_dim // PANEL)):
            begin = part * PANEL
            lanes = min(PANEL, head_dim - begin)
            to = scratch.values[(part * length + key) * PANEL :][:lanes]
            source = row[v_column + begin : v_column + begin + lanes]
            for d in range(lanes):
                to[d] = source[d]


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def _soften(scores: Any) -> Any:
    """Turn scores into weights whose largest is 1; return their sum."""
    peak = _LEAST
    for key in range(len(scores)):
        peak = max(peak, scores[key])
    total = np.float32(0.0)
    for key in range(len(scores)):
        weight = exp(scores[key] - peak)
        scores[key] = weight
        total += weight
    return total


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _product(inputs: Any, like: Any, rows: int, address: int, lanes: int, tile: Any) -> None:
    """Multiply the first rows of `inputs` by the panel at this address, of which so many lanes count."""
    prefetching = (np.int64(address), np.int64(STEP_BYTES), np.int64(inputs.shape[1]), np.int64(0))
    if lanes > HALF:
        multiply_panel(inputs, like, 0, rows, address, prefetching, tile)
    else:
        multiply_half_panel(inputs, like, 0, rows, address, prefetching, tile)


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def attend(
    taken: Any, qkv: Any, texts: Any, heads: int, scale: Any, scales: Any, out: Any, scratch: Any, tile: Any
) -> None:
    """Compute `out` [T, heads * head_dim], operands, of some heads: number n is head n % heads of text n // heads.

    `qkv` [T, 3 * heads * head_dim] are queries, keys and values; `texts` [n + 1] where each text begins, and all end.
    `taken` is the first head, and their number. `scales` [heads * head_dim] is what `out` is multiplied by.
    """
    width = qkv.shape[1] // 3
    head_dim = width // heads
    like = scratch.queries
    for number in range(taken[0], taken[0] + taken[1]):
        text = number // heads
        column = number % heads * head_dim
        first = texts[text]
        length = texts[text + 1] - first
        _pack(qkv, first, length, width + column, 2 * width + column, head_dim, scratch)
        scores = scratch.scores[: TILE_ROWS * length].reshape((TILE_ROWS, length))
        pieces = -(-length // PIECE_ROWS)
        for piece in range(pieces):
            begin = length * piece // pieces
            rows = length * (piece + 1) // pieces - begin
            for r in range(rows):
                query = qkv[first + begin + r, column : column + head_dim]
                to = scratch.queries[r]
                for d in range(head_dim):
                    to[d] = query[d] * scale
            for panel in range(-(-length // PANEL)):
                lanes = min(PANEL, length - panel * PANEL)
                address = np.int64(scratch.keys.ctypes.data) + panel * head_dim * PANEL * LANE_BYTES
                _product(scratch.queries, like, rows, address, lanes, tile)
                for r in range(rows):
                    some = scores[r, panel * PANEL : panel * PANEL + lanes]
                    sums = tile[r]
                    for lane in range(lanes):
                        some[lane] = sums[lane]
            for r in range(rows):
                scratch.totals[r] = _soften(scores[r])
            for part in range(-(-head_dim // PANEL)):
                lanes = min(PANEL, head_dim - part * PANEL)
                address = np.int64(scratch.values.ctypes.data) + part * length * PANEL * LANE_BYTES
                _product(scores, like, rows, address, lanes, tile)
                for r in range(rows):
                    at = column + part * PANEL
                    found = out[first + begin + r, at : at + lanes]
                    factors = scales[at : at + lanes]
                    sums = tile[r]
                    share = np.float32(1.0) / scratch.totals[r]
                    for lane in range(lanes):
                        found[lane] = element(sums[lane] * share * factors[lane], out)
