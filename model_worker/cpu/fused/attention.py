"""Paged attention of the fused stack: an online softmax between the two products of cache_dot.py.

Knows sequences as attention_plan.py cuts them up, and how a block lies in memory (cache_dot.py). What a product takes
is of the queries' dtype, as elsewhere in the model; scores and sums are float32. Indices are not checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from model_worker.cpu.fused.attention_plan import PANEL_KEYS
from model_worker.cpu.simd.cache_dot import GROUP, PANEL_GROUPS, gather, score
from model_worker.cpu.simd.dot_bf16 import LANES, PIECE_ROWS
from model_worker.cpu.simd.elements import INSIDE, MATH, element
from model_worker.cpu.simd.softmax import LOWEST, soften

_LOWEST = np.float32(LOWEST)
_WORD_BYTES = 4


class Cache(NamedTuple):
    """The KV cache, and where this step's tokens go."""

    k: NDArray[np.int64]  # [L] addresses of blocks
    v: NDArray[np.int64]
    like: NDArray[Any]  # any array of the cache's element type
    kv_heads: int
    block_size: int
    k_dim: int
    v_dim: int
    blocks: NDArray[np.int64]  # [turns, T]
    offsets: NDArray[np.int64]  # [turns, T]
    # [turns, T]: how many tokens after this one are in its group, but in no sequence: 0 unless it is the last of its
    # sequence and a token of this step began the group.
    unused: NDArray[np.int64]


class Attention(NamedTuple):
    """How the batch attends: the plan of attention_plan.py, and each layer's scale and window.

    With each turn after the first, positions are larger by one.
    """

    tables: NDArray[np.int32]
    tiles: NDArray[np.int64]
    members: NDArray[np.int64]
    units: NDArray[np.int64]
    last_units: NDArray[np.int64]  # of the last layer
    scales: NDArray[np.float32]  # [L], for powers of two
    windows: NDArray[np.int64]  # [L]


@njit(nogil=True, cache=True, **INSIDE)
def _head_bytes(cache: Any, dim: int) -> Any:
    """Bytes of one head in one block."""
    return cache.block_size * dim * cache.like.itemsize


@njit(nogil=True, cache=True, **INSIDE)
def key_group(cache: Any, layer: int, head: int, block: int, offset: int) -> Any:
    """The address of K of the group that begins at `offset` of a block."""
    return cache.k[layer] + (block * cache.kv_heads + head) * _head_bytes(cache, cache.k_dim) + offset * _WORD_BYTES


@njit(nogil=True, cache=True, **INSIDE)
def value_group(cache: Any, layer: int, head: int, block: int, offset: int) -> Any:
    begin = (block * cache.kv_heads + head) * _head_bytes(cache, cache.v_dim)
    return cache.v[layer] + begin + offset * cache.like.itemsize * cache.v_dim


@njit(nogil=True, cache=True, **INSIDE)
def _token(attention: Any, tile: Any, number: int) -> int:
    """Where in the batch a tile's token is."""
    token: int = attention.members[tile[0] + number, 1] if tile[4] else tile[1] + number
    return token


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def _begin(q: Any, attention: Any, tile: Any, head: int, group: int, first: int, own: Any) -> None:
    """The rows of one head, which are the core's own from `first` on."""
    queries, acc, peak, totals = own[0], own[3], own[4], own[5]
    for number in range(tile[2] * group):
        row, token = first + number, _token(attention, tile, number // group)
        query, to, sums = q[token, head * group + number % group], queries[row], acc[row]
        for d in range(len(query)):
            to[d] = query[d]
        for d in range(len(sums)):
            sums[d] = np.float32(0.0)
        peak[row] = _LOWEST
        for lane in range(LANES):
            totals[row, lane] = np.float32(0.0)


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def _end(out: Any, attention: Any, tile: Any, head: int, group: int, first: int, own: Any) -> None:
    acc, totals = own[3], own[5]
    width = acc.shape[1]
    for number in range(tile[2] * group):
        row, at = first + number, (head * group + number % group) * width
        to, sums = out[_token(attention, tile, number // group), at : at + width], acc[row]
        total = np.float32(0.0)
        for lane in range(LANES):
            total += totals[row, lane]
        share = np.float32(1.0) / total
        for d in range(width):
            to[d] = element(sums[d] * share, out)


@njit(nogil=True, cache=True, **INSIDE)
def _next_group(index: int, offset: int, size: int) -> Any:
    """The block, as its place in a table, and the token of it where the group after this one begins."""
    return (index + 1, 0) if offset + GROUP == size else (index, offset + GROUP)


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def _walk(
    layer: int,
    table: Any,
    heads: Any,
    rows: Any,
    keys_walked: Any,
    positions: Any,
    cache: Any,
    scale: Any,
    window: int,
    own: Any,
) -> None:
    """Rows first to end of a tile take the keys first to end of one sequence, a panel at a time, head by head: those
    of a block lie one after the other.

    Blocks lie scattered in memory, so nobody else foresees what comes next: a panel's V is asked for while its K is
    multiplied, and the K that follows while V is.

    `heads` are first and end of the KV heads, and how many rows each has. `positions` are that of the first row, how
    many rows have the same, and by how much it grows after these.
    """
    queries, scores, weights, acc, peak, totals, k_groups, v_groups, k_early = own
    first_head, end_head, head_rows = heads
    first_row, end_row = rows
    position_of_first, group, growth = positions
    count_rows, size = end_row - first_row, cache.block_size
    pieces = -(-count_rows // PIECE_ROWS)
    least, longer = count_rows // pieces, count_rows % pieces
    first_key, end = keys_walked
    panel_index, panel_offset = first_key // size, first_key % size
    for start in range(first_key, end, PANEL_KEYS):
        keys = min(PANEL_KEYS, end - start)
        count = -(-keys // GROUP)
        next_index, next_offset = panel_index, panel_offset
        for _ in range(count):
            next_index, next_offset = _next_group(next_index, next_offset, size)
        for head in range(first_head, end_head):
            index, offset = panel_index, panel_offset
            for g in range(PANEL_GROUPS):
                if g < count:
                    k_groups[g] = key_group(cache, layer, head, table[index], offset)
                    v_groups[g] = value_group(cache, layer, head, table[index], offset)
                    index, offset = _next_group(index, offset, size)
                else:  # what lies beyond the last group is computed with it and hidden
                    k_groups[g], v_groups[g] = k_groups[count - 1], v_groups[count - 1]
            another, left, index, offset = first_head, end - start - PANEL_KEYS, next_index, next_offset
            if head + 1 < end_head:
                another, left, index, offset = head + 1, keys, panel_index, panel_offset
            for g in range(PANEL_GROUPS):
                if g * GROUP < left:
                    k_early[g] = key_group(cache, layer, another, table[index], offset)
                    index, offset = _next_group(index, offset, size)
            first = first_row + (head - first_head) * head_rows
            for piece in range(pieces):
                at, many = first + piece * least + min(piece, longer), least + (1 if piece < longer else 0)
                score(queries, cache.like, at, many, k_groups, size, v_groups, scores)
            for query in range(count_rows // group):
                position = position_of_first + query * growth - start
                visible = max(0, min(keys, position + 1))
                hidden = min(max(0, position - window + 1), visible)
                for row in range(first + query * group, first + (query + 1) * group):
                    shrink = soften(scores, row, hidden, visible, scale, weights, peak, totals)
                    if shrink < np.float32(1.0):
                        sums = acc[row]
                        for d in range(len(sums)):
                            sums[d] *= shrink
            for piece in range(pieces):
                at, many = first + piece * least + min(piece, longer), least + (1 if piece < longer else 0)
                gather(weights, cache.like, at, many, count, v_groups, cache.v_dim, k_early, size, acc)
        panel_index, panel_offset = next_index, next_offset


@njit(nogil=True, cache=True, **INSIDE)
def _run_tile(
    layer: int, turn: int, attention: Any, tile: Any, first: int, end: int, group: int, cache: Any, own: Any
) -> None:
    """All keys that any of a tile's queries sees, of these KV heads: first those that its sequences share, then those
    of each."""
    scale, window, tables = attention.scales[layer], attention.windows[layer], attention.tables
    rows, position, shared = tile[2] * group, tile[3] + turn, tile[5]
    heads = first, end, rows
    if tile[4] == 0:
        keys = max(0, position - window + 1) // GROUP * GROUP, position + tile[2]
        _walk(layer, tables[tile[0]], heads, (0, rows), keys, (position, group, 1), cache, scale, window, own)
        return
    members = attention.members[tile[0] : tile[0] + tile[4]]
    for m in range(len(members)):
        if members[m, 2] + turn >= window:
            shared = 0  # it does not see the beginning, so its panels begin elsewhere
    if shared > 0:
        same = (shared - 1, group, 0)
        _walk(layer, tables[members[0, 0]], heads, (0, rows), (0, shared), same, cache, scale, window, own)
    for m in range(len(members)):
        position = members[m, 2] + turn
        keys = max(shared, (position - window + 1) // GROUP * GROUP), position + 1
        of_m = m * group, (m + 1) * group
        _walk(layer, tables[members[m, 0]], heads, of_m, keys, (position, group, 1), cache, scale, window, own)


@njit(nogil=True, cache=True, **INSIDE)
def attention_room(q: Any, cache: Any, attention: Any) -> Any:
    """Memory of a core's own for the widest unit."""
    group, most = q.shape[1] // cache.kv_heads, 0
    for number in range(len(attention.units)):
        tile, first, end = attention.units[number]
        most = max(most, attention.tiles[tile, 2] * group * (end - first))
    return (
        np.empty((most, cache.k_dim), q.dtype),
        np.empty((most, PANEL_KEYS), np.float32),
        np.empty((most, PANEL_KEYS), q.dtype),
        np.empty((most, cache.v_dim), np.float32),
        np.empty(most, np.float32),
        np.empty((most, LANES), np.float32),
        np.empty(PANEL_GROUPS, np.int64),
        np.empty(PANEL_GROUPS, np.int64),
        np.empty(PANEL_GROUPS, np.int64),
    )


@njit(nogil=True, cache=True, **INSIDE)
def attend(layer: int, turn: int, taken: Any, q: Any, cache: Any, attention: Any, own: Any, out: Any) -> None:
    """The heads of `out` [T, >= heads * v_dim] from `q` [T, heads, k_dim], both operands, of some units: the first, and
    how many."""
    group, last = q.shape[1] // cache.kv_heads, layer == len(attention.scales) - 1
    for number in range(taken[0], taken[0] + taken[1]):
        unit = attention.last_units[number] if last else attention.units[number]
        tile, first, end = attention.tiles[unit[0]], unit[1], unit[2]
        rows = tile[2] * group
        for head in range(first, end):
            _begin(q, attention, tile, head, group, (head - first) * rows, own)
        _run_tile(layer, turn, attention, tile, first, end, group, cache, own)
        for head in range(first, end):
            _end(out, attention, tile, head, group, (head - first) * rows, own)
