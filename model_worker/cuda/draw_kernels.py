"""Triton kernels that draw tokens without a sort: the edge of what a row keeps is searched, and noise is made for that.

The order of logits is that of their bits as integers, so the search halves a range of integers, at most 32 times. A
first pass leaves of the row what may lie at the edge or before it: a few hundred tokens in most texts. Definition and
noise are those of sampling/draw.py and sampling/rng.py. Knows columns; knows no requests and no batch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# triton leaves its decorator untyped.
_jit: Any = triton.jit

# Logits from 0 down are counted in bins of 1/64; the last one has all below -32.
BINS = tl.constexpr(2048)
_BINS_OF_ONE = tl.constexpr(64.0)
# Of the ordered integers of logits: that of 0, and one below that of -inf.
_KEY_OF_ZERO = tl.constexpr(0)
_KEY_BELOW_ALL = tl.constexpr(-2147483648)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_STEP = tl.constexpr(2.0**-52)


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
def _place(x):
    """Return the bin of each logit. No number, which only rows have that draw nothing, is in the last one."""
    return tl.minimum(tl.where(x == x, x, float("-inf")) * -_BINS_OF_ONE, BINS - 1.0).to(tl.int32)


@_jit
def _at_least(source, count, key, BLOCK: tl.constexpr):
    """Count the logits of which the key is at least `key`, and sum their exponentials in float64."""
    number = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(source + at, mask=at < count, other=float("-inf"))
        found = (at < count) & (_key(x) >= key)
        number += found.to(tl.int32)
        mass += tl.where(found, tl.exp(x.to(tl.float64)), 0.0)
    return tl.sum(number), tl.sum(mass)


@_jit
def _last_key(source, count, by_mass, wanted, mass, BLOCK: tl.constexpr):
    """Return the largest key so that the logits from it on are `wanted` in number, or reach `mass`."""
    low = tl.zeros([], tl.int64) + _KEY_BELOW_ALL
    high = tl.zeros([], tl.int64) + (_KEY_OF_ZERO + 1)
    while high - low > 1:
        middle = low + (high - low) // 2
        number, sums = _at_least(source, count, middle.to(tl.int32), BLOCK)
        enough = tl.where(by_mass, sums >= mass, number >= wanted)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low.to(tl.int32)


@_jit(do_not_specialize=["row_stride", "width"])
def edge_kernel(
    edges,
    ties,
    scratch,
    scaled,
    top_k,
    top_p,
    log_min_p,
    row_stride,
    width,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Find where a row's kept tokens end: all above edges[row], and the first ties[row] of those equal to it.

    `ties` is the width where all of them are kept. Programs: row.
    """
    row = tl.program_id(0)
    logits = scaled + row.to(tl.int64) * row_stride
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    least = tl.load(log_min_p + row)
    edge = tl.zeros([], tl.float32) + float("-inf")
    tied = width
    if (k < width) | (p < 1.0) | (least > float("-inf")):
        bins = tl.zeros([BINS], tl.int32)
        mass = tl.zeros([BLOCK], tl.float64)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + at, mask=at < width, other=float("-inf"))
            mass += tl.exp(x.to(tl.float64))
            place = _place(x)
            bins += tl.histogram(place, BINS, mask=at < width)
        total = tl.sum(mass)
        # The last bin that may be needed: by the number of tokens, by the least mass that its bins can have, and by
        # the least logit.
        bin = tl.arange(0, BINS)
        number = tl.cumsum(bins, 0)
        least_mass = tl.cumsum(bins.to(tl.float64) * tl.exp((bin + 1).to(tl.float64) * (-1.0 / _BINS_OF_ONE)), 0)
        by_number = tl.sum((number < k).to(tl.int32))
        by_mass = tl.sum((least_mass < p * total).to(tl.int32))
        by_logit = _place(least)
        last = tl.minimum(by_number, by_logit)
        # The mass that top_p is a share of is that of the top_k tokens, so all of these are needed.
        if (p < 1.0) & (k >= width):
            last = tl.minimum(by_mass, by_logit)
        if (p < 1.0) & (k < width):
            last = by_number
        count = tl.sum(tl.where(bin <= last, bins, 0))
        source = logits
        if (count <= ROOM) & (last < BINS - 1):
            source = scratch + row.to(tl.int64) * ROOM
            filled = 0
            for start in range(0, width, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = tl.load(logits + at, mask=at < width, other=float("-inf"))
                place = _place(x)
                taken = (at < width) & (place <= last)
                to = filled + tl.cumsum(taken.to(tl.int32), 0) - 1
                tl.store(source + to, x, mask=taken & (to < ROOM))
                filled += tl.sum(taken.to(tl.int32))
            # All threads of the program read what others of them have written.
            tl.debug_barrier()
        else:
            count = width
        key = tl.zeros([], tl.int32) + _KEY_BELOW_ALL
        if (k < width) & (k <= count):
            key = _last_key(source, count, False, k, 0.0, BLOCK)
            above, above_mass = _at_least(source, count, key + 1, BLOCK)
            tied = k - above
            total = above_mass + tied.to(tl.float64) * tl.exp(_value(key).to(tl.float64))
        if p < 1.0:
            wanted = p * total
            by_p = _last_key(source, count, True, 0, wanted, BLOCK)
            if by_p >= key:
                above, above_mass = _at_least(source, count, by_p + 1, BLOCK)
                one = tl.exp(_value(by_p).to(tl.float64))
                needed = tl.maximum(tl.ceil((wanted - above_mass) / one), 1.0)
                # Division rounds: one fewer may do.
                needed = tl.where((needed > 1.0) & (above_mass + (needed - 1.0) * one >= wanted), needed - 1.0, needed)
                needed = tl.minimum(needed, width.to(tl.float64)).to(tl.int32)
                tied = tl.where(by_p == key, tl.minimum(tied, needed), needed)
                key = by_p
        least_key = _key(least)
        if key < least_key:
            # The smallest logit that is likely enough: as many are at least that as at least `least`.
            likely, _ = _at_least(source, count, least_key, BLOCK)
            key = _last_key(source, count, False, tl.maximum(likely, 1), 0.0, BLOCK)
            tied = width
        equal, _ = _at_least(source, count, key, BLOCK)
        more, _ = _at_least(source, count, key + 1, BLOCK)
        tied = tl.where(tied >= equal - more, width, tied)
        edge = _value(key)
    tl.store(edges + row, edge)
    tl.store(ties + row, tied)


@_jit(do_not_specialize=["row_stride", "width", "parts"])
def pick_kernel(
    scores,
    tokens,
    scaled,
    keys,
    edges,
    ties,
    row_stride,
    width,
    parts,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Find the kept token of the largest logit and noise in a part of a row. Programs: row, part of BLOCKS blocks."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    logits = scaled + row.to(tl.int64) * row_stride
    edge = tl.load(edges + row)
    tied = tl.load(ties + row)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    before = 0
    if tied < width:
        # Tokens equal to the edge in earlier parts, which are kept first.
        for start in range(0, part * BLOCKS * BLOCK, BLOCK):
            x = tl.load(logits + start + tl.arange(0, BLOCK))
            before += tl.sum((x == edge).to(tl.int32))
    best = tl.zeros([], tl.float64) + float("-inf")
    token = tl.zeros([], tl.int64)
    for block in range(BLOCKS):
        at = (part * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < width, other=float("-inf"))
        equal = (x == edge) & (at < width)
        kept = (x > edge) | (equal & (before + tl.cumsum(equal.to(tl.int32), 0) <= tied))
        before += tl.sum(equal.to(tl.int32))
        if tl.sum(kept.to(tl.int32)) > 0:
            mixed = key + (at + 1).to(tl.uint64) * _GOLDEN
            mixed = (mixed ^ (mixed >> 30)) * _MIX_1
            mixed = (mixed ^ (mixed >> 27)) * _MIX_2
            mixed = mixed ^ (mixed >> 31)
            uniform = ((mixed >> 12).to(tl.float64) + 0.5) * _STEP
            score = tl.where(kept, x.to(tl.float64) - tl.log(-tl.log(uniform)), float("-inf"))
            largest = tl.max(score, 0)
            first = tl.min(tl.where(score == largest, at, 2147483647), 0)
            token = tl.where(largest > best, first.to(tl.int64), token)
            best = tl.maximum(best, largest)
    tl.store(scores + row * parts + part, best)
    tl.store(tokens + row * parts + part, token)
