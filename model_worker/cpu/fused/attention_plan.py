"""The plan of the fused stack's attention: tiles of queries, and units of work that cores claim.

Sequences that begin with the same cached blocks are found by their block tables. Their rows in decode form one tile,
which reads the keys and values of these blocks once for all of them, and then for each row those of its own.

Compiled, because it is done once a step for a few numbers. Knows lengths and block numbers. Indices are not checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from model_worker.batch import ForwardBatch
from model_worker.cpu.simd.cache_dot import GROUP, PANEL_GROUPS

# Rows (query token x query head) of a tile: enough to reuse a block from the first-level cache, few enough to fit.
TILE_ROWS = 32
# Tiles with at most this many rows wait for memory, so one unit takes all KV heads and reads blocks from end to end.
STREAMING_ROWS = 8
# What is shared ends where a panel of keys does, so that each row adds up in the same order with others as alone.
PANEL_KEYS = GROUP * PANEL_GROUPS


class Plan(NamedTuple):
    """Tiles, and units of them."""

    # [n, 6]: sequence, first token, number of tokens, position of the first token, 0, 0; or of rows in decode with the
    # same beginning: first member, first token of it, number of tokens, its position, the same number, shared keys
    tiles: NDArray[np.int64]
    members: NDArray[np.int64]  # [rows in decode, 3]: sequence, token, position
    units: NDArray[np.int64]  # [m, 3]: tile, first KV head, end of KV heads


def plan_for(batch: ForwardBatch, kv_heads: int, group: int, cores: int, cascade: bool = True) -> Plan:
    """Make the plan of a batch; `group` query heads share a KV head.

    With `cascade`, rows in decode that begin with the same blocks read these once, together.
    """
    query_start = batch.query_start.numpy()
    kv_len = batch.kv_len.numpy()
    tables = batch.block_tables.numpy()
    # A tile takes as many queries as fit, and rows that share a beginning are split so that every core has a tile.
    most = max(1, TILE_ROWS // group)
    together = max(2, min(most, -(-len(kv_len) // cores))) if cascade else 1
    count = batch.num_sequences + batch.num_tokens // most
    tiles = np.zeros((count, 6), np.int64)
    members = np.empty((len(kv_len), 3), np.int64)
    count = _cut(query_start, kv_len, tables, batch.block_size, most, together, tiles, members)
    # Where there are few tiles, the heads of those that stream are split, too, to keep all cores busy.
    split = min(kv_heads, -(-2 * cores // count))
    units = np.empty((count * kv_heads, 3), np.int64)
    return Plan(tiles[:count], members, units[: _share_out(tiles, count, kv_heads, group, split, units)])


@njit(nogil=True, cache=True)
def _shared_keys(tables: Any, members: Any, one: int, other: int, block_size: int) -> int:
    """Count the keys that two members have in common, in whole panels, and before the token of either."""
    blocks = min(members[one, 2], members[other, 2]) // block_size
    same = 0
    while same < blocks and tables[members[one, 0], same] == tables[members[other, 0], same]:
        same += 1
    return same * block_size // PANEL_KEYS * PANEL_KEYS


@njit(nogil=True, cache=True)
def _decoding(query_start: Any, kv_len: Any, tables: Any, members: Any) -> int:
    """Fill in rows in decode, and return their number; those that begin with the same block are neighbours.

    Sorted by insertion: numba takes seconds to compile a sort of its own, and a batch has at most some hundred rows.
    """
    count = 0
    for s in range(len(kv_len)):
        if query_start[s + 1] - query_start[s] == 1:
            place = count
            while place > 0 and tables[members[place - 1, 0], 0] > tables[s, 0]:
                for column in range(3):
                    members[place, column] = members[place - 1, column]
                place -= 1
            members[place, 0] = s
            members[place, 1] = query_start[s]
            members[place, 2] = kv_len[s] - 1
            count += 1
    return count


@njit(nogil=True, cache=True)
def _cut(
    query_start: Any, kv_len: Any, tables: Any, block_size: int, most: int, together: int, tiles: Any, members: Any
) -> int:
    """Fill in tiles of at most `most` queries of one sequence, or `together` of several; return their number."""
    decoding = _decoding(query_start, kv_len, tables, members)
    count = 0
    first = 0
    while first < decoding:
        size = 1
        shared = 0
        while first + size < decoding and size < together:
            keys = _shared_keys(tables, members, first, first + size, block_size)
            # One that shares much less would take from the others what they share.
            if keys == 0 or 2 * keys < shared:
                break
            shared = keys if size == 1 else min(shared, keys)
            size = size + 1
        tiles[count, 0] = members[first, 0] if size == 1 else first
        tiles[count, 1] = members[first, 1]
        tiles[count, 2] = size
        tiles[count, 3] = members[first, 2]
        tiles[count, 4] = 0 if size == 1 else size
        tiles[count, 5] = shared
        first = first + size
        count = count + 1
    for s in range(len(kv_len)):
        queries = query_start[s + 1] - query_start[s]
        if queries > 1:
            for skipped in range(0, queries, most):
                tiles[count, 0] = s
                tiles[count, 1] = query_start[s] + skipped
                tiles[count, 2] = min(most, queries - skipped)
                tiles[count, 3] = kv_len[s] - queries + skipped
                count += 1
    return count


@njit(nogil=True, cache=True)
def _share_out(tiles: Any, count: int, kv_heads: int, group: int, split: int, units: Any) -> int:
    """Fill in units, and return their number: tiles with more than a few rows have one for each head."""
    unit = 0
    for tile in range(count):
        ranges = split if tiles[tile, 2] * group <= STREAMING_ROWS else kv_heads
        for part in range(ranges):
            units[unit, 0] = tile
            units[unit, 1] = part * kv_heads // ranges
            units[unit, 2] = (part + 1) * kv_heads // ranges
            unit += 1
    return unit


def zeros_after(batch: ForwardBatch, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each token how many zeros must follow it in its group: see Cache."""
    if batch.max_query == 1:
        return np.where(offsets % GROUP == 0, GROUP - 1, 0)
    last = batch.query_start.numpy()[1:].astype(np.int64) - 1
    queries = np.diff(batch.query_start.numpy())
    within = offsets[last] % GROUP
    unused = np.zeros_like(offsets)
    unused[last] = np.where(within < queries, GROUP - 1 - within, 0)
    return unused
