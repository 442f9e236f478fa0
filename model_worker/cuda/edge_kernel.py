"""A Triton kernel that finds where the tokens end that a row keeps, without a sort.

The order of logits is that of their bits as integers, so the search halves a range of integers, at most 32 times. It
does so among a few hundred tokens in most texts, which are gathered before: those that may lie at the edge or before
it. For a top-k up to the number of tiles no pass over the row is needed to know these: k tiles have a logit that is at
least the k-th largest of the tiles' largest ones. The definition is that of sampling/draw.py. Knows columns; knows no
requests and no batch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from model_worker.cuda.draw_rows import (
    CHANGED,
    GREEDY,
    LOG_MIN_P,
    LOGPROBS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WARPED,
    integer,
    largest_of_row,
    real,
    scaled,
)

# triton leaves its decorator untyped.
_jit: Any = triton.jit

# Logits from 0 down are counted in bins of 1/64; the last one has all below -32.
BINS = tl.constexpr(2048)
_BINS_OF_ONE = tl.constexpr(64.0)
# Of the ordered integers of logits: that of 0, and one below that of -inf.
_KEY_OF_ZERO = tl.constexpr(0)
_KEY_BELOW_ALL = tl.constexpr(-2147483648)


@_jit
def _key(x):
    """Map float32 to int32 in the same order. Both zeros are one number."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@_jit
def _value(key):
    """Return the float32 of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@_jit
def _kth_largest(x, k):
    """Return the k-th largest of a block of logits."""
    keys = _key(x)
    low = tl.zeros([], tl.int64) + _KEY_BELOW_ALL
    high = tl.zeros([], tl.int64) + (_KEY_OF_ZERO + 1)
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return _value(low.to(tl.int32))


@_jit
def _least_of_bins(logits, width, top, temperature, k, p, BLOCK: tl.constexpr):
    """Return a bound that the edge of a row's `k` tokens, or without these of its mass, reaches, and the row's mass."""
    bins = tl.zeros([BINS], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = scaled(tl.load(logits + at, mask=at < width, other=float("-inf")), top, temperature)
        mass += tl.exp(x.to(tl.float64))
        bins += tl.histogram(tl.minimum(x * -_BINS_OF_ONE, BINS - 1.0).to(tl.int32), BINS, mask=at < width)
    total = tl.sum(mass)
    # The last bin that may be needed: by the number of tokens, or by the least mass that its bins can have.
    bin = tl.arange(0, BINS)
    least_mass = tl.cumsum(bins.to(tl.float64) * tl.exp((bin + 1).to(tl.float64) * (-1.0 / _BINS_OF_ONE)), 0)
    last = tl.sum((least_mass < p * total).to(tl.int32))
    if k < width:
        last = tl.sum((tl.cumsum(bins, 0) < k).to(tl.int32))
    bound = (last + 1).to(tl.float32) * (-1.0 / _BINS_OF_ONE)
    return tl.where(last < BINS - 1, bound, float("-inf")), total


@_jit
def _gathered(
    scratch,
    logits,
    tops,
    width,
    tiles,
    top,
    temperature,
    bound,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Write the possible scaled logits from `bound` on to `scratch`, and return their number, which may exceed ROOM.

    Blocks whose tiles have none are not read.
    """
    filled = tl.zeros([], tl.int32)
    for start in range(0, width, BLOCK):
        tile = start // TILE + tl.arange(0, BLOCK // TILE)
        tallest = tl.max(tl.load(tops + tile, mask=tile < tiles, other=float("-inf")), 0)
        if scaled(tallest, top, temperature) >= bound:
            at = start + tl.arange(0, BLOCK)
            x = scaled(tl.load(logits + at, mask=at < width, other=float("-inf")), top, temperature)
            taken = (x >= bound) & (x > float("-inf"))
            to = filled + tl.cumsum(taken.to(tl.int32), 0) - 1
            tl.store(scratch + to, x, mask=taken & (to < ROOM))
            filled += tl.sum(taken.to(tl.int32), 0)
    # All threads of the program read what others of them have written.
    tl.debug_barrier()
    return filled


@_jit
def _at_least(source, count, top, temperature, key, BLOCK: tl.constexpr):
    """Count the scaled logits of which the key is at least `key`, and sum their exponentials in float64."""
    number = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = scaled(tl.load(source + at, mask=at < count, other=float("-inf")), top, temperature)
        found = (at < count) & (_key(x) >= key)
        number += found.to(tl.int32)
        mass += tl.where(found, tl.exp(x.to(tl.float64)), 0.0)
    return tl.sum(number), tl.sum(mass)


@_jit
def _last_key(source, count, top, temperature, by_mass, wanted, mass, BLOCK: tl.constexpr):
    """Return the largest key so that the logits from it on are `wanted` in number, or reach `mass`."""
    low = tl.zeros([], tl.int64) + _KEY_BELOW_ALL
    high = tl.zeros([], tl.int64) + (_KEY_OF_ZERO + 1)
    while high - low > 1:
        middle = low + (high - low) // 2
        number, sums = _at_least(source, count, top, temperature, middle.to(tl.int32), BLOCK)
        enough = tl.where(by_mass, sums >= mass, number >= wanted)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low.to(tl.int32)


@_jit
def _edge_among(source, count, top, temperature, k, p, least, total, width, BLOCK: tl.constexpr):
    """Return where the kept tokens end, and how many at that are kept, given the `count` logits that matter.

    `total` is the mass that `p` is a share of, where `k` does not say it.
    """
    key = tl.zeros([], tl.int32) + _KEY_BELOW_ALL
    tied = tl.zeros([], tl.int32) + width
    if k < width:
        if k <= count:
            key = _last_key(source, count, top, temperature, False, k, 0.0, BLOCK)
            above, above_mass = _at_least(source, count, top, temperature, key + 1, BLOCK)
            tied = k - above
            total = above_mass + tied.to(tl.float64) * tl.exp(_value(key).to(tl.float64))
        else:
            # All that are possible.
            _, total = _at_least(source, count, top, temperature, key + 1, BLOCK)
    if p < 1.0:
        wanted = p * total
        by_p = _last_key(source, count, top, temperature, True, 0, wanted, BLOCK)
        # Where they do not reach the mass, the edge is that of the least logit.
        if (by_p >= key) & (by_p > _KEY_BELOW_ALL):
            above, above_mass = _at_least(source, count, top, temperature, by_p + 1, BLOCK)
            one = tl.exp(_value(by_p).to(tl.float64))
            needed = tl.maximum(tl.ceil((wanted - above_mass) / one), 1.0)
            # Division rounds: one fewer may do.
            needed = tl.where((needed > 1.0) & (above_mass + (needed - 1.0) * one >= wanted), needed - 1.0, needed)
            needed = tl.minimum(needed, width.to(tl.float64)).to(tl.int32)
            tied = tl.where(by_p == key, tl.minimum(tied, needed), needed)
            key = by_p
    if key < _key(least):
        key = _key(least)
        tied = tl.zeros([], tl.int32) + width
    equal, _ = _at_least(source, count, top, temperature, key, BLOCK)
    more, _ = _at_least(source, count, top, temperature, key + 1, BLOCK)
    return _value(key), tl.where(tied >= equal - more, width, tied)


@_jit
def _write_edge(
    edges,
    ties,
    scratch,
    tops,
    source,
    records,
    row,
    top,
    is_finite,
    width,
    tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Find where the kept tokens of a row end, whose logits are `source`."""
    temperature = real(records, row, TEMPERATURE).to(tl.float32)
    k = integer(records, row, TOP_K).to(tl.int32)
    p = real(records, row, TOP_P)
    least = real(records, row, LOG_MIN_P).to(tl.float32)
    # A least logit alone is the edge.
    edge = least
    tied = tl.zeros([], tl.int32) + width
    if is_finite & ((k < width) | (p < 1.0)):
        total = tl.zeros([], tl.float64)
        if (k < width) & (k <= tiles):
            tile = tl.arange(0, TILES)
            tallest = tl.load(tops + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
            bound = _kth_largest(scaled(tallest, top, temperature), k)
        else:
            bound, total = _least_of_bins(source, width, top, temperature, k, p, BLOCK)
        # The mass that top_p is a share of is that of all top_k tokens.
        if (k >= width) | (p >= 1.0):
            bound = tl.maximum(bound, least)
        near = scratch + row.to(tl.int64) * ROOM
        count = _gathered(near, source, tops + row * tiles, width, tiles, top, temperature, bound, TILE, BLOCK, ROOM)
        if count <= ROOM:
            edge, tied = _edge_among(near, count, 0.0, 1.0, k, p, least, total, width, BLOCK)
        else:
            edge, tied = _edge_among(source, width, top, temperature, k, p, least, total, width, BLOCK)
    tl.store(edges + row, edge)
    tl.store(ties + row, tied)


@_jit(do_not_specialize=["tiles"])
def edge_kernel(
    edges,
    ties,
    row_tops,
    scratch,
    tops,
    logits,
    changed,
    records,
    row_stride,
    changed_stride,
    width,
    tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Find where a row's kept tokens end: all above edges[row], and the first ties[row] of those equal to it.

    `ties` is the width where all of them are kept; row_tops[row] is the row's largest logit, or NaN where nothing is
    drawn and the mass of kept tokens is not reported. Rows may have their logits in `changed`. Programs: row.
    """
    row = tl.program_id(0)
    source = logits + row.to(tl.int64) * row_stride
    top, is_finite = largest_of_row(tops, row, tiles, TILES)
    # Their types differ: each has its own code.
    place = integer(records, row, CHANGED)
    if place >= 0:
        own = changed + place * changed_stride
        _write_edge(
            edges, ties, scratch, tops, own, records, row, top, is_finite, width, tiles, TILE, TILES, BLOCK, ROOM
        )
    else:
        _write_edge(
            edges, ties, scratch, tops, source, records, row, top, is_finite, width, tiles, TILE, TILES, BLOCK, ROOM
        )
    is_read = (integer(records, row, GREEDY) == 0) | (integer(records, row, LOGPROBS) == WARPED)
    tl.store(row_tops + row, tl.where(is_finite & is_read, top, float("nan")))
