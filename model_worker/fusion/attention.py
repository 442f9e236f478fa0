"""Paged attention of the fused stack: an online softmax between the two products of cache_tile.py.

Knows sequences as cpu.py cuts them up, and how a block lies in memory (cache_tile.py). What a product takes is rounded
to the cache's dtype, as elsewhere in the model; scores and sums are float32. Indices are not checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from model_worker.attention.cpu_kernel import _exp
from model_worker.fusion.cache_tile import GROUP, PANEL_GROUPS, gather, score
from model_worker.fusion.elements import element
from model_worker.fusion.team import claim, claimed_after
from model_worker.fusion.tile import TILE_ROWS

_MATH = {"reassoc", "contract", "arcp", "nsz"}
_LOWEST = np.float32(-1e30)  # of a softmax that has seen no key
_WORD_BYTES = 4
PANEL_KEYS = GROUP * PANEL_GROUPS


class Cache(NamedTuple):
    """The KV cache, and where this step's tokens go."""

    k: NDArray[np.int64]  # [L] addresses of blocks
    v: NDArray[np.int64]
    like: NDArray[Any]  # any array of the cache's element type
    kv_heads: int
    block_size: int
    k_dim: int
    v_dim: int
    blocks: NDArray[np.int64]  # [T]
    offsets: NDArray[np.int64]  # [T]
    # [T]: how many tokens after this one are in its group, but in no sequence: 0 unless it is the last of its sequence
    # and a token of this step began the group.
    unused: NDArray[np.int64]


class Attention(NamedTuple):
    """How the batch attends: the plan of cpu.py, and each layer's scale and window."""

    tables: NDArray[np.int32]
    tiles: NDArray[np.int64]
    units: NDArray[np.int64]
    scales: NDArray[np.float32]  # [L]
    windows: NDArray[np.int64]  # [L]


@njit(nogil=True, cache=True)
def _head_bytes(cache: Any, dim: int) -> Any:
    """Bytes of one head in one block."""
    return cache.block_size * dim * cache.like.itemsize


@njit(nogil=True, cache=True)
def key_group(cache: Any, layer: int, head: int, block: int, offset: int) -> Any:
    """The address of K of the group that begins at `offset` of a block."""
    return cache.k[layer] + (block * cache.kv_heads + head) * _head_bytes(cache, cache.k_dim) + offset * _WORD_BYTES


@njit(nogil=True, cache=True)
def value_group(cache: Any, layer: int, head: int, block: int, offset: int) -> Any:
    begin = (block * cache.kv_heads + head) * _head_bytes(cache, cache.v_dim)
    return cache.v[layer] + begin + offset * cache.like.itemsize * cache.v_dim


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def _soften(scores: Any, scale: Any, begin: int, end: int, width: int, weights: Any, peak: Any, total: Any) -> Any:
    """A row's scores of keys begin to end become weights; returns by how much earlier results shrink."""
    highest = peak[0]
    for j in range(begin, end):
        highest = max(highest, scores[j] * scale)
    shrink = _exp(peak[0] - highest)
    added = np.float32(0.0)
    # What is hidden has the weight 0 whatever is in the cache there, even if it is not a number.
    for j in range(width):
        weight = _exp(scores[j] * scale - highest) if begin <= j < end else np.float32(0.0)
        added += weight
        weights[j] = element(weight, weights)
    peak[0] = highest
    total[0] = total[0] * shrink + added
    return shrink


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def _begin(q: Any, tile: Any, head: int, group: int, queries: Any, acc: Any, peak: Any, total: Any) -> None:
    for row in range(tile[2] * group):
        query, to, sums = q[tile[1] + row // group, head * group + row % group], queries[row], acc[row]
        for d in range(len(query)):
            to[d] = query[d]
        for d in range(len(sums)):
            sums[d] = np.float32(0.0)
        peak[row], total[row] = _LOWEST, np.float32(0.0)


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def _end(out: Any, tile: Any, head: int, group: int, acc: Any, total: Any) -> None:
    width = acc.shape[1]
    for row in range(tile[2] * group):
        at = (head * group + row % group) * width
        to, sums = out[tile[1] + row // group, at : at + width], acc[row]
        share = np.float32(1.0) / total[row]
        for d in range(width):
            to[d] = element(sums[d] * share, out)


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def _run_tile(
    layer: int, table: Any, tile: Any, head: int, group: int, cache: Any, scale: Any, window: int, own: Any
) -> None:
    """Walk a tile's keys, a panel at a time, from the first that any of its queries sees to the last."""
    queries, scores, weights, acc, peak, total, k_groups, v_groups = own
    rows, first_position, end = tile[2] * group, tile[3], tile[3] + tile[2]
    pieces = -(-rows // TILE_ROWS)
    first = max(0, first_position - window + 1) // GROUP * GROUP
    for start in range(first, end, PANEL_KEYS):
        keys = min(PANEL_KEYS, end - start)
        count = -(-keys // GROUP)
        for g in range(PANEL_GROUPS):
            # What lies beyond the last group is computed with it and hidden.
            position = start + min(g, count - 1) * GROUP
            block, offset = table[position // cache.block_size], position % cache.block_size
            k_groups[g] = key_group(cache, layer, head, block, offset)
            v_groups[g] = value_group(cache, layer, head, block, offset)
        for piece in range(pieces):
            at = rows * piece // pieces
            score(queries, at, rows * (piece + 1) // pieces - at, k_groups, cache.block_size, scores)
        for row in range(rows):
            position = first_position + row // group - start
            visible = max(0, min(keys, position + 1))
            hidden = min(max(0, position - window + 1), visible)
            kept = row, row + 1
            shrink = _soften(
                scores[row],
                scale,
                hidden,
                visible,
                count * GROUP,
                weights[row],
                peak[kept[0] : kept[1]],
                total[kept[0] : kept[1]],
            )
            if shrink < np.float32(1.0):  # the maximum settles after a few panels
                sums = acc[row]
                for d in range(len(sums)):
                    sums[d] *= shrink
        for piece in range(pieces):
            at = rows * piece // pieces
            gather(weights, at, rows * (piece + 1) // pieces - at, count, v_groups, cache.v_dim, acc)


@njit(nogil=True, cache=True)
def attend(counter: Any, claimed: int, cores: int, layer: int, q: Any, cache: Any, attention: Any, out: Any) -> int:
    """The heads of `out` [T, >= heads * v_dim] from `q` [T, heads, k_dim], both operands. Cores claim units.

    Returns the claims when all is done.
    """
    group, most, count = q.shape[1] // cache.kv_heads, 0, len(attention.units)
    for t in range(len(attention.tiles)):
        most = max(most, attention.tiles[t, 2] * group)
    own = (
        np.empty((most, cache.k_dim), cache.like.dtype),
        np.empty((most, PANEL_KEYS), np.float32),
        np.empty((most, PANEL_KEYS), cache.like.dtype),
        np.empty((most, cache.v_dim), np.float32),
        np.empty(most, np.float32),
        np.empty(most, np.float32),
        np.empty(PANEL_GROUPS, np.int64),
        np.empty(PANEL_GROUPS, np.int64),
    )
    u = claim(counter, claimed)
    while u < count:
        unit = attention.units[u]
        tile = attention.tiles[unit[0]]
        table = attention.tables[tile[0]]
        for head in range(unit[1], unit[2]):
            _begin(q, tile, head, group, own[0], own[3], own[4], own[5])
            _run_tile(layer, table, tile, head, group, cache, attention.scales[layer], attention.windows[layer], own)
            _end(out, tile, head, group, own[3], own[5])
        u = claim(counter, claimed)
    return claimed_after(claimed, count, cores)
