"""The plan of attention over a batch: tiles of queries, units of work, a run of units for each core.

Compiled, because it is done once a step for a few numbers, where each call of numpy costs more than the arithmetic.
Knows lengths only. Indices are not checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from model_worker.cpu.fused.attention_plan import TILE_ROWS


class Plan(NamedTuple):
    """Tiles, units and their bounds. Core c runs the units `bounds[c]` to `bounds[c + 1]`."""

    tiles: NDArray[np.int64]  # [n, 4]: sequence, first token, number of tokens, position of the first token
    units: NDArray[np.int64]  # [m, 3]: tile, first KV head, end of KV heads
    bounds: NDArray[np.int64]  # [cores + 1]

    @property
    def cores(self) -> int:
        return len(self.bounds) - 1


@njit(nogil=True, cache=True)
def tiles_of(query_start: Any, kv_len: Any, group: int) -> Any:
    """Cut a batch's queries into tiles; `group` query heads share a KV head."""
    most = max(1, TILE_ROWS // group)
    count = 0
    for s in range(len(kv_len)):
        count += -(-(query_start[s + 1] - query_start[s]) // most)
    tiles = np.empty((count, 4), np.int64)
    tile = 0
    for s in range(len(kv_len)):
        first = query_start[s]
        length = query_start[s + 1] - query_start[s]
        for skipped in range(0, length, most):
            tiles[tile, 0] = s
            tiles[tile, 1] = first + skipped
            tiles[tile, 2] = min(most, length - skipped)
            tiles[tile, 3] = kv_len[s] - length + skipped
            tile += 1
    return tiles


@njit(nogil=True, cache=True)
def cost_of(tiles: Any, tile: int, window: int) -> int:
    """Return the cost of a tile: its products of a query and a key."""
    pairs: int = tiles[tile, 2] * (tiles[tile, 2] + min(tiles[tile, 3], window))
    return pairs


@njit(nogil=True, cache=True)
def total_cost(tiles: Any, window: int) -> int:
    total = 0
    for tile in range(len(tiles)):
        total += cost_of(tiles, tile, window)
    return total


@njit(nogil=True, cache=True)
def share_out(tiles: Any, kv_heads: int, group: int, window: int, cores: int, streaming_rows: int) -> Any:
    """Share units out to cores: runs of about the same cost, and their bounds.

    A tile with at most `streaming_rows` rows streams K and V.
    """
    # A streaming tile's heads are split only where there would be too few units to keep all cores busy.
    split = min(kv_heads, -(-2 * cores // len(tiles)))
    count = 0
    for tile in range(len(tiles)):
        count += split if tiles[tile, 2] * group <= streaming_rows else kv_heads
    units = np.empty((count, 3), np.int64)
    cost = np.empty(count, np.int64)
    unit = 0
    total = 0
    for tile in range(len(tiles)):
        ranges = split if tiles[tile, 2] * group <= streaming_rows else kv_heads
        for part in range(ranges):
            first = part * kv_heads // ranges
            end = (part + 1) * kv_heads // ranges
            units[unit, 0] = tile
            units[unit, 1] = first
            units[unit, 2] = end
            own = cost_of(tiles, tile, window) * (end - first)
            cost[unit] = total + own // 2  # a unit goes where its middle is
            total += own
            unit += 1
    bounds = np.zeros(cores + 1, np.int64)
    for core in range(1, cores):
        bounds[core] = np.searchsorted(cost, total * core / cores)
    bounds[cores] = count
    return units, bounds
