"""Paged attention of the fused stack: an online softmax between the two products of cache_dot.py.

Knows sequences as attention_plan.py cuts them up, and the memory layout of a block (cache_dot.py, or kv_codes.py for
one in codes, which a core widens a panel of one head at a time). Operands of products have the queries' dtype, as
elsewhere in the model; scores and sums are float32. Indices are not checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from model_worker.cpu.fused.attention_plan import PANEL_KEYS
from model_worker.cpu.simd.cache_dot import GROUP, PANEL_GROUPS, gather, score
from model_worker.cpu.simd.dot_bf16 import LANES, PIECE_ROWS
from model_worker.cpu.simd.elements import INSIDE, MATH, carray, element, pointer
from model_worker.cpu.simd.kv_codes import IN_WORDS, widen_keys, widen_values
from model_worker.cpu.simd.softmax import LOWEST, soften, soften_scaled

_LOWEST = np.float32(LOWEST)
_WORD_BYTES = 4
_PAIR_BYTES = 2
_SCALE_BYTES = 4


class Cache(NamedTuple):
    """The KV cache, and the slots of this step's tokens."""

    k: NDArray[np.int64]  # [L] addresses of blocks
    v: NDArray[np.int64]
    like: NDArray[Any]  # any array of the element type of K and V where they are multiplied
    kind: int  # IN_WORDS: blocks have such elements; or the kind of their codes (kv_codes.py)
    kv_heads: int
    block_size: int
    k_dim: int
    v_dim: int
    blocks: NDArray[np.int64]  # [T]
    offsets: NDArray[np.int64]  # [T]
    # [T]: how many tokens after this one are in its group, but in no sequence: 0 unless it is the last of its
    # sequence and a token of this step began the group.
    unused: NDArray[np.int64]


class Decoded(NamedTuple):
    """One head's K and V of a panel, out of codes: a core's own. Empty where a cache has none."""

    keys: NDArray[Any]  # words as cache_dot.py has them, elements of `Cache.like`
    values: NDArray[Any]
    key_scales: NDArray[np.float32]  # [PANEL_KEYS]
    value_scales: NDArray[np.float32]


class Attention(NamedTuple):
    """The attention of a batch: the plan of attention_plan.py, and each layer's scale and window.

    With each step after the first, positions are larger by one.
    """

    tables: NDArray[np.int32]
    tiles: NDArray[np.int64]
    members: NDArray[np.int64]
    units: NDArray[np.int64]
    scales: NDArray[np.float32]  # [L], for powers of two
    windows: NDArray[np.int64]  # [L]


@njit(nogil=True, cache=True, **INSIDE)
def _element_bytes(cache: Any) -> Any:
    return cache.like.itemsize if cache.kind == IN_WORDS else 1


@njit(nogil=True, cache=True, **INSIDE)
def _head(cache: Any, head: int, block: int, dim: int) -> Any:
    """Return where one head's elements begin in one layer's K or V, and where its scales do, if it is in codes."""
    elements = cache.block_size * dim * _element_bytes(cache)
    scales = 0 if cache.kind == IN_WORDS else cache.block_size * _SCALE_BYTES
    begin = (block * cache.kv_heads + head) * (elements + scales)
    return begin, begin + elements


@njit(nogil=True, cache=True, **INSIDE)
def key_group(cache: Any, layer: int, head: int, block: int, offset: int) -> Any:
    """Return the address of K of the group that begins at `offset` of a block."""
    words = _WORD_BYTES if cache.kind == IN_WORDS else _PAIR_BYTES
    return cache.k[layer] + _head(cache, head, block, cache.k_dim)[0] + offset * words


@njit(nogil=True, cache=True, **INSIDE)
def value_group(cache: Any, layer: int, head: int, block: int, offset: int) -> Any:
    return cache.v[layer] + _head(cache, head, block, cache.v_dim)[0] + offset * _element_bytes(cache) * cache.v_dim


@njit(nogil=True, cache=True, **INSIDE)
def key_scale(cache: Any, layer: int, head: int, block: int, offset: int) -> Any:
    """Return the address of the scale of K in codes at `offset` of a block."""
    return cache.k[layer] + _head(cache, head, block, cache.k_dim)[1] + offset * _SCALE_BYTES


@njit(nogil=True, cache=True, **INSIDE)
def value_scale(cache: Any, layer: int, head: int, block: int, offset: int) -> Any:
    return cache.v[layer] + _head(cache, head, block, cache.v_dim)[1] + offset * _SCALE_BYTES


@njit(nogil=True, cache=True, **INSIDE)
def _token(attention: Any, tile: Any, number: int) -> int:
    """Return the index in the batch of a tile's token."""
    token: int = attention.members[tile[0] + number, 1] if tile[4] else tile[1] + number
    return token


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def _begin(q: Any, attention: Any, tile: Any, head: int, group: int, first: int, own: Any) -> None:
    """Fill the rows of one head, which are the core's own from `first` on."""
    queries = own[0]
    acc = own[3]
    peak = own[4]
    totals = own[5]
    for number in range(tile[2] * group):
        row = first + number
        token = _token(attention, tile, number // group)
        query = q[token, head * group + number % group]
        to = queries[row]
        sums = acc[row]
        for d in range(len(query)):
            to[d] = query[d]
        for d in range(len(sums)):
            sums[d] = np.float32(0.0)
        peak[row] = _LOWEST
        for lane in range(LANES):
            totals[row, lane] = np.float32(0.0)


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def _end(out: Any, attention: Any, tile: Any, head: int, group: int, first: int, own: Any) -> None:
    acc = own[3]
    totals = own[5]
    width = acc.shape[1]
    for number in range(tile[2] * group):
        row = first + number
        at = (head * group + number % group) * width
        to = out[_token(attention, tile, number // group), at : at + width]
        sums = acc[row]
        total = np.float32(0.0)
        for lane in range(LANES):
            total += totals[row, lane]
        share = np.float32(1.0) / total
        for d in range(width):
            to[d] = element(sums[d] * share, out)


@njit(nogil=True, cache=True, **INSIDE)
def _next_group(index: int, offset: int, size: int) -> Any:
    """Return the block, as its place in a table, and the offset where the group after this one begins."""
    return (index + 1, 0) if offset + GROUP == size else (index, offset + GROUP)


@njit(nogil=True, cache=True, **INSIDE)
def _decode_panel(
    layer: int,
    table: Any,
    place: Any,
    head: int,
    count: int,
    cache: Any,
    k_groups: Any,
    v_groups: Any,
    k_early: Any,
    to: Any,
) -> None:
    """Decode one head's K and V of `count` groups, and let the addresses of groups be those of the words.

    `place` is the first group's: the block as its index in the table, and the offset. V is prefetched beside K, and the
    K that follows beside V.
    """
    index, offset = place
    for g in range(count):
        block = table[index]
        k_groups[g] = widen_keys(cache.kind, g, k_groups[g], cache.block_size, v_groups[g], to.keys)
        of_keys = carray(pointer(key_scale(cache, layer, head, block, offset)), (GROUP,), np.float32)
        of_values = carray(pointer(value_scale(cache, layer, head, block, offset)), (GROUP,), np.float32)
        for token in range(GROUP):
            to.key_scales[g * GROUP + token] = of_keys[token]
            to.value_scales[g * GROUP + token] = of_values[token]
        index, offset = _next_group(index, offset, cache.block_size)
    for g in range(count):
        v_groups[g] = widen_values(cache.kind, g, v_groups[g], k_early[g], to.values)
    for g in range(count, PANEL_GROUPS):
        k_groups[g] = k_groups[count - 1]
        v_groups[g] = v_groups[count - 1]


@njit(nogil=True, cache=True, **INSIDE)
def _find_panel(layer: int, table: Any, place: Any, head: int, count: int, cache: Any, own: Any) -> None:
    """Write the addresses of one head's K and V of a panel. `place` is its first group: index in the table, and offset.

    What lies beyond the last of `count` groups is computed with it and hidden: it has the last one's addresses.
    """
    k_groups = own[6]
    v_groups = own[7]
    index, offset = place
    for g in range(PANEL_GROUPS):
        if g < count:
            k_groups[g] = key_group(cache, layer, head, table[index], offset)
            v_groups[g] = value_group(cache, layer, head, table[index], offset)
            index, offset = _next_group(index, offset, cache.block_size)
        else:
            k_groups[g] = k_groups[count - 1]
            v_groups[g] = v_groups[count - 1]


@njit(nogil=True, cache=True, **INSIDE)
def _find_early(layer: int, table: Any, place: Any, head: int, keys: int, cache: Any, own: Any) -> None:
    """Write the addresses of the K that is multiplied after this panel, of `keys` keys at most."""
    k_early = own[8]
    index, offset = place
    for g in range(PANEL_GROUPS):
        if g * GROUP < keys:
            k_early[g] = key_group(cache, layer, head, table[index], offset)
            index, offset = _next_group(index, offset, cache.block_size)


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def _soften_rows(
    first: int, count: int, keys: int, positions: Any, scale: Any, window: int, kind: int, own: Any
) -> None:
    """Turn the scores of `count` rows from `first` on into weights, each row with the keys that it sees of this panel.

    `positions` are as those of `_walk`, the first row's counted from the panel's first key.
    """
    scores = own[1]
    weights = own[2]
    acc = own[3]
    peak = own[4]
    totals = own[5]
    decoded = own[9]
    position_of_first, group, growth = positions
    for query in range(count // group):
        position = position_of_first + query * growth
        visible = max(0, min(keys, position + 1))
        hidden = min(max(0, position - window + 1), visible)
        for row in range(first + query * group, first + (query + 1) * group):
            if kind == IN_WORDS:
                shrink = soften(scores, row, hidden, visible, scale, weights, peak, totals)
            else:
                of_keys = decoded.key_scales
                of_values = decoded.value_scales
                shrink = soften_scaled(scores, row, hidden, visible, scale, weights, peak, totals, of_keys, of_values)
            if shrink < np.float32(1.0):
                sums = acc[row]
                for d in range(len(sums)):
                    sums[d] *= shrink


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
    """Walk the rows first to end of a tile over the keys first to end of one sequence, a panel at a time, head by head.

    The heads of a block lie one after the other. Blocks lie scattered in memory, so the hardware prefetcher cannot
    foresee what comes next: a panel's V is prefetched while its K is multiplied, and the K that follows while V is.

    `heads` are first and end of the KV heads, and the rows of each. `positions` are that of the first row, the number
    of rows that have the same, and the growth after these.
    """
    queries, scores, weights, acc, _peak, _totals, k_groups, v_groups, k_early, decoded = own
    first_head, end_head, head_rows = heads
    first_row, end_row = rows
    position_of_first, group, growth = positions
    count_rows = end_row - first_row
    size = cache.block_size
    pieces = -(-count_rows // PIECE_ROWS)
    least = count_rows // pieces
    longer = count_rows % pieces
    first_key, end = keys_walked
    panel_index = first_key // size
    panel_offset = first_key % size
    for start in range(first_key, end, PANEL_KEYS):
        keys = min(PANEL_KEYS, end - start)
        count = -(-keys // GROUP)
        next_index = panel_index
        next_offset = panel_offset
        for _ in range(count):
            next_index, next_offset = _next_group(next_index, next_offset, size)
        for head in range(first_head, end_head):
            place = panel_index, panel_offset
            _find_panel(layer, table, place, head, count, cache, own)
            if head + 1 < end_head:
                _find_early(layer, table, place, head + 1, keys, cache, own)
            else:
                following = next_index, next_offset
                _find_early(layer, table, following, first_head, end - start - PANEL_KEYS, cache, own)
            stride = size
            early = k_early
            if cache.kind != IN_WORDS:
                _decode_panel(layer, table, place, head, count, cache, k_groups, v_groups, k_early, decoded)
                stride = PANEL_KEYS
                early = k_groups
            first = first_row + (head - first_head) * head_rows
            for piece in range(pieces):
                at = first + piece * least + min(piece, longer)
                many = least + (1 if piece < longer else 0)
                score(queries, cache.like, at, many, k_groups, stride, v_groups, scores)
            from_panel = position_of_first - start, group, growth
            _soften_rows(first, count_rows, keys, from_panel, scale, window, cache.kind, own)
            for piece in range(pieces):
                at = first + piece * least + min(piece, longer)
                many = least + (1 if piece < longer else 0)
                gather(weights, cache.like, at, many, count, v_groups, cache.v_dim, early, stride, acc)
        panel_index = next_index
        panel_offset = next_offset


@njit(nogil=True, cache=True, **INSIDE)
def _run_tile(layer: int, attention: Any, tile: Any, first: int, end: int, group: int, cache: Any, own: Any) -> None:
    """Run a tile for these KV heads over all keys that any of its queries sees.

    The keys that its sequences share come first, then those of each.
    """
    scale = attention.scales[layer]
    window = attention.windows[layer]
    tables = attention.tables
    rows = tile[2] * group
    position = tile[3]
    shared = tile[5]
    heads = first, end, rows
    if tile[4] == 0:
        keys = max(0, position - window + 1) // GROUP * GROUP, position + tile[2]
        _walk(layer, tables[tile[0]], heads, (0, rows), keys, (position, group, 1), cache, scale, window, own)
        return
    members = attention.members[tile[0] : tile[0] + tile[4]]
    for m in range(len(members)):
        if members[m, 2] >= window:
            shared = 0  # it does not see the beginning, so its panels begin elsewhere
    if shared > 0:
        same = (shared - 1, group, 0)
        _walk(layer, tables[members[0, 0]], heads, (0, rows), (0, shared), same, cache, scale, window, own)
    for m in range(len(members)):
        position = members[m, 2]
        keys = max(shared, (position - window + 1) // GROUP * GROUP), position + 1
        of_m = m * group, (m + 1) * group
        _walk(layer, tables[members[m, 0]], heads, of_m, keys, (position, group, 1), cache, scale, window, own)


@njit(nogil=True, cache=True, **INSIDE)
def attention_scratch(q: Any, cache: Any, attention: Any) -> Any:
    """Return a core's own memory for the widest unit."""
    group = q.shape[1] // cache.kv_heads
    most = 0
    for number in range(len(attention.units)):
        tile, first, end = attention.units[number]
        most = max(most, attention.tiles[tile, 2] * group * (end - first))
    decoded = 0 if cache.kind == IN_WORDS else PANEL_KEYS
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
        Decoded(
            np.empty(decoded * cache.k_dim, cache.like.dtype),
            np.empty(decoded * cache.v_dim, cache.like.dtype),
            np.empty(decoded, np.float32),
            np.empty(decoded, np.float32),
        ),
    )


@njit(nogil=True, cache=True, **INSIDE)
def attend(layer: int, taken: Any, q: Any, cache: Any, attention: Any, own: Any, out: Any) -> None:
    """Compute the heads of `out` [T, >= heads * v_dim] from `q` [T, heads, k_dim], both operands, for some units.

    `taken` is the first unit, and their number.
    """
    group = q.shape[1] // cache.kv_heads
    for number in range(taken[0], taken[0] + taken[1]):
        unit = attention.units[number]
        tile = attention.tiles[unit[0]]
        first = unit[1]
        end = unit[2]
        rows = tile[2] * group
        for head in range(first, end):
            _begin(q, attention, tile, head, group, (head - first) * rows, own)
        _run_tile(layer, attention, tile, first, end, group, cache, own)
        for head in range(first, end):
            _end(out, attention, tile, head, group, (head - first) * rows, own)
