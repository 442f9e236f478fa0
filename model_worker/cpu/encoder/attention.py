"""Attention of texts whose tokens all see each other, or those near them: one head of one text at a time.

The keys of a head become panels (packed_linear.py), as weights are, and so do its values: both products are those of
simd/dot_bf16.py, between which weights are made of scores in vector registers (softmax.py). Where the scratch memory is
bfloat16 the products are, too, with sums in float32: twice as fast on processors with such instructions. A few queries
at a time, so that their weights stay in the first-level cache. Indices are not checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from model_worker.cpu.gemm.weight_format import HALF, LANE_BYTES, PANEL
from model_worker.cpu.simd.dot_bf16 import (
    LANES,
    PIECE_ROWS,
    STEP_BYTES,
    TILE_ROWS,
    multiply_half_panel,
    multiply_panel,
)
from model_worker.cpu.simd.elements import INSIDE, carray, element, pointer, widened
from model_worker.cpu.simd.softmax import LOG2_E, LOWEST, soften

_LEAST = np.float32(LOWEST)
_POWERS_OF_TWO = np.float32(LOG2_E)


class Nearness(NamedTuple):
    """What attention of a layer makes of the places of tokens. Arrays for P places; empty ones where it makes nothing.

    `window`: tokens that are less than so many apart see each other; 0 for all.
    """

    window: int
    cos: NDArray[np.float32]  # [P, head_dim / 2]: queries and keys are turned
    sin: NDArray[np.float32]
    biases: NDArray[
        np.float32
    ]  # [heads, 2 P - 1]: of a key that is so many less P - 1 behind, before scores are scaled


class Scratch(NamedTuple):
    """A core's own memory for the longest text, of L tokens. Elements are float32 or bfloat16; a word is 4 bytes."""

    keys: NDArray[Any]  # [panels of L keys, words of head_dim, PANEL words]
    values: NDArray[Any]  # [panels of head_dim, words of L, PANEL words]
    queries: NDArray[Any]  # [TILE_ROWS, head_dim in whole words]
    weights: NDArray[Any]  # [TILE_ROWS * L in whole words]
    spare: NDArray[Any]  # [TILE_ROWS, PANEL]: weights of the last keys
    peaks: NDArray[np.float32]  # [TILE_ROWS]
    totals: NDArray[np.float32]  # [TILE_ROWS, LANES]


@njit(nogil=True, cache=True, **INSIDE)
def _in_words(elements: int, like: Any) -> Any:
    """Return a number of elements that fills whole words."""
    each = LANE_BYTES // like.itemsize
    return -(-elements // each) * each


@njit(nogil=True, cache=True, **INSIDE)
def scratch_for(longest: int, head_dim: int, like: Any) -> Any:
    """Make a core's memory for texts of at most `longest` tokens, with elements as those of `like`."""
    width = _in_words(head_dim, like)
    length = _in_words(longest, like)
    return Scratch(
        np.zeros(-(-longest // PANEL) * width * PANEL, like.dtype),
        np.zeros(-(-head_dim // PANEL) * length * PANEL, like.dtype),
        np.zeros((TILE_ROWS, width), like.dtype),
        np.zeros(TILE_ROWS * length, like.dtype),
        np.zeros((TILE_ROWS, PANEL), like.dtype),
        np.zeros(TILE_ROWS, np.float32),
        np.zeros((TILE_ROWS, LANES), np.float32),
    )


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _write_head(head: Any, place: int, near: Any, to: Any) -> None:
    """Write a head of the token at this place as elements, turned if its layer does so."""
    if len(near.cos) == 0:
        for d in range(len(head)):
            to[d] = element(head[d], to)
        return
    half = len(head) // 2
    cos = near.cos[place]
    sin = near.sin[place]
    low = head[:half]
    high = head[half:]
    turned = to[half:]
    for d in range(half):
        to[d] = element(low[d] * cos[d] - high[d] * sin[d], to)
        turned[d] = element(high[d] * cos[d] + low[d] * sin[d], to)


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _pack(
    qkv: Any, first: int, length: int, k_column: int, v_column: int, head_dim: int, near: Any, scratch: Any
) -> None:
    """Write the keys and values of a head as panels."""
    each = LANE_BYTES // scratch.keys.itemsize
    row = scratch.queries[0]
    steps = len(row) // each
    key_words = carray(pointer(np.int64(row.ctypes.data)), (steps,), np.uint32)
    panels = carray(pointer(np.int64(scratch.keys.ctypes.data)), (len(scratch.keys) // each,), np.uint32)
    rows = _in_words(length, scratch.values)
    for key in range(length):
        _write_head(qkv[first + key, k_column : k_column + head_dim], key, near, row)
        to = panels[key // PANEL * steps * PANEL + key % PANEL :]
        for step in range(steps):
            to[step * PANEL] = key_words[step]
    for part in range(-(-head_dim // PANEL)):
        begin = part * PANEL
        lanes = min(PANEL, head_dim - begin)
        for key in range(rows):
            values = scratch.values[(part * rows + key // each * each) * PANEL + key % each :]
            if key < length:
                source = qkv[first + key, v_column + begin : v_column + begin + lanes]
                for d in range(lanes):
                    values[d * each] = element(source[d], values)
            else:
                for d in range(lanes):
                    values[d * each] = element(np.float32(0.0), values)


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _product(inputs: Any, like: Any, rows: int, address: int, lanes: int, tile: Any) -> None:
    """Multiply the first rows of `inputs` by the panel at this address, of which so many lanes count."""
    prefetching = (np.int64(address), np.int64(STEP_BYTES), np.int64(inputs.shape[1]), np.int64(0))
    if lanes > HALF:
        multiply_panel(inputs, like, 0, rows, address, prefetching, tile)
    else:
        multiply_half_panel(inputs, like, 0, rows, address, prefetching, tile)


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _soften_panel(
    rows: int, query: int, key: int, keys: int, length: int, scale: Any, near: Any, scratch: Any, at: int, tile: Any
) -> None:
    """Make weights of a tile of scores: of `rows` queries from place `query` on, for `keys` keys from `key` on.

    They go to the columns from `at` on of weights as wide as `length`, or to `spare` if the panel is not whole.
    """
    window = near.window
    weights = scratch.weights
    whole = keys == PANEL
    place = np.int64(weights.ctypes.data) + at * weights.itemsize if whole else np.int64(scratch.spare.ctypes.data)
    target = carray(pointer(place), (TILE_ROWS, length if whole else PANEL), weights.dtype)
    for r in range(rows):
        begin = np.int64(0)
        end = np.int64(keys)
        if window > 0:
            begin = min(max(begin, query + r - window + 1 - key), end)
            end = max(min(end, query + r + window - key), begin)
        made = soften(tile, np.int64(r), begin, end, scale, target, scratch.peaks, scratch.totals)
        row = weights[r * length : r * length + at]
        if made < np.float32(1.0):
            for c in range(at):
                row[c] = element(widened(row[c]) * made, row)
        if not whole:
            last = weights[r * length + at : (r + 1) * length]
            for c in range(len(last)):
                last[c] = scratch.spare[r, c]


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def attend(
    taken: Any,
    qkv: Any,
    texts: Any,
    seen: Any,
    heads: int,
    scale: Any,
    scales: Any,
    near: Any,
    out: Any,
    scratch: Any,
    tile: Any,
) -> None:
    """Compute `out` [T, heads * head_dim], operands, of some heads: number n is head n % heads of text n // heads.

    `qkv` [T, 3 * heads * head_dim] are queries, keys and values; `texts` [n + 1] where each text begins, and all end;
    `seen` [n] the tokens of each that are keys, the first ones. `taken` is the first head, and their number. `scales`
    [heads * head_dim] is what `out` is multiplied by; `near` is a Nearness.
    """
    width = qkv.shape[1] // 3
    head_dim = width // heads
    like = scratch.queries
    key_width = like.shape[1]
    in_twos = scale * _POWERS_OF_TWO
    for number in range(taken[0], taken[0] + taken[1]):
        text = number // heads
        head = number % heads
        column = head * head_dim
        first = texts[text]
        length = texts[text + 1] - first
        keys = seen[text]
        _pack(qkv, first, keys, width + column, 2 * width + column, head_dim, near, scratch)
        all_rows = _in_words(keys, like)
        pieces = -(-length // PIECE_ROWS)
        for piece in range(pieces):
            begin = length * piece // pieces
            rows = length * (piece + 1) // pieces - begin
            for r in range(rows):
                row = qkv[first + begin + r, column : column + head_dim]
                _write_head(row, begin + r, near, scratch.queries[r])
            first_key = np.int64(0)
            last_key = keys
            if near.window > 0:
                first_key = min(max(first_key, begin - near.window + 1), keys - 1) // PANEL * PANEL
                last_key = min(last_key, begin + rows - 1 + near.window)
            count = _in_words(last_key - first_key, like)
            scratch.peaks[:] = _LEAST
            scratch.totals[:] = np.float32(0.0)
            for key in range(first_key, last_key, PANEL):
                lanes = min(PANEL, last_key - key)
                address = np.int64(scratch.keys.ctypes.data) + key * key_width * like.itemsize
                _product(scratch.queries, like, rows, address, lanes, tile)
                if near.biases.shape[1] > 0:
                    middle = near.biases.shape[1] // 2
                    for r in range(rows):
                        biases = near.biases[head, middle + key - begin - r :]
                        for lane in range(lanes):
                            tile[r, lane] += biases[lane]
                _soften_panel(rows, begin, key, lanes, count, in_twos, near, scratch, key - first_key, tile)
            weights = scratch.weights[: TILE_ROWS * count].reshape((TILE_ROWS, count))
            for part in range(-(-head_dim // PANEL)):
                lanes = min(PANEL, head_dim - part * PANEL)
                skipped = (part * all_rows + first_key) * PANEL * like.itemsize
                _product(weights, like, rows, np.int64(scratch.values.ctypes.data) + skipped, lanes, tile)
                for r in range(rows):
                    at = column + part * PANEL
                    found = out[first + begin + r, at : at + lanes]
                    factors = scales[at : at + lanes]
                    sums = tile[r]
                    total = scratch.totals[r].sum()
                    # A token sees nothing where its window ends behind the last key. Like torch's, its sum is 0 then.
                    share = np.float32(0.0) if total == np.float32(0.0) else np.float32(1.0) / total
                    for lane in range(lanes):
                        found[lane] = element(sums[lane] * share * factors[lane], out)
