"""How the fused stack cuts attention up: tiles of queries, and units of work that cores claim.

Sequences that begin with the same cached blocks are found by their block tables. Their rows in decode form one tile,
which reads the keys and values of these blocks once for all of them, and then for each row those of its own.

Compiled, because it is done once a step for a few numbers. Knows lengths and block numbers. Indices are not checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from model_worker.attention.plan import TILE_ROWS, share_out, tiles_of
from model_worker.batch import ForwardBatch

# What is shared ends where a panel of keys does, so that each row adds up in the same order with others as alone.
PANEL_KEYS = 64
# Tiles with at most this many rows wait for memory, so one unit takes all KV heads and reads blocks from end to end.
_STREAMING_ROWS = 8
_NO_WINDOW = 1 << 40


class Plan(NamedTuple):
    """Tiles, and units of them."""

    # [n, 6]: sequence, first token, number of tokens, position of the first token, 0, 0; or of rows in decode with the
    # same beginning: first member, first token of it, number of tokens, its position, the same number, shared keys
    tiles: NDArray[np.int64]
    members: NDArray[np.int64]  # [rows in decode, 3]: sequence, token, position
    units: NDArray[np.int64]  # [m, 3]: tile, first KV head, end of KV heads


def plan_for(batch: ForwardBatch, kv_heads: int, group: int, cores: int) -> Plan:
    """`group` query heads share a KV head."""
    query_start, kv_len, tables = batch.query_start.numpy(), batch.kv_len.numpy(), batch.block_tables.numpy()
    tiles, members = _cut(query_start, kv_len, tables, batch.block_size, group, cores)
    return Plan(tiles, members, share_out(tiles, kv_heads, group, _NO_WINDOW, cores, _STREAMING_ROWS)[0])


@njit(nogil=True, cache=True)
def _shared_keys(tables: Any, one: Any, other: Any, block_size: int) -> int:
    """How many keys two members have in common, in whole panels, and before the token of either."""
    blocks = min(one[2], other[2]) // block_size
    same = 0
    while same < blocks and tables[one[0], same] == tables[other[0], same]:
        same += 1
    return same * block_size // PANEL_KEYS * PANEL_KEYS


@njit(nogil=True, cache=True)
def _members(query_start: Any, kv_len: Any, tables: Any) -> Any:
    """Rows in decode; those that begin with the same block are neighbours."""
    members, count = np.empty((len(kv_len), 3), np.int64), 0
    for s in range(len(kv_len)):
        if query_start[s + 1] - query_start[s] == 1:
            members[count, 0], members[count, 1], members[count, 2] = s, query_start[s], kv_len[s] - 1
            count += 1
    members = members[:count]
    first_blocks = np.empty(count, np.int64)
    for i in range(count):
        first_blocks[i] = tables[members[i, 0], 0]
    return members[np.argsort(first_blocks, kind="mergesort")]


@njit(nogil=True, cache=True)
def _cut(query_start: Any, kv_len: Any, tables: Any, block_size: int, group: int, cores: int) -> Any:
    members, alone = _members(query_start, kv_len, tables), tiles_of(query_start, kv_len, group)
    # Fewer than fit, so that every core has a tile.
    most = max(2, min(TILE_ROWS // group, -(-len(members) // cores)))
    tiles, count, first = np.zeros((len(alone), 6), np.int64), 0, 0
    while first < len(members):
        size, shared = 1, 0
        while first + size < len(members) and size < most:
            keys = _shared_keys(tables, members[first], members[first + size], block_size)
            # One that shares much less would take from the others what they share.
            if keys == 0 or 2 * keys < shared:
                break
            shared, size = keys if size == 1 else min(shared, keys), size + 1
        tiles[count, 1], tiles[count, 2], tiles[count, 3] = members[first, 1], size, members[first, 2]
        if size == 1:
            tiles[count, 0] = members[first, 0]
        else:
            tiles[count, 0], tiles[count, 4], tiles[count, 5] = first, size, shared
        first, count = first + size, count + 1
    for t in range(len(alone)):
        s = alone[t, 0]
        if query_start[s + 1] - query_start[s] > 1:
            tiles[count, :4] = alone[t]
            count += 1
    return tiles[:count], members
