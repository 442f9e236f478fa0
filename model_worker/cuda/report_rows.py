"""What a kernel reports of a row beside its token: log-probabilities of it, of the most probable and of named tokens.

Tokens come by probability, and among equals the lower one first. Sums are float64. Knows records of rows; knows no
requests and no batch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from model_worker.cuda.draw_rows import (
    LOGPROBS,
    NAME_COUNT,
    NAMED,
    TEMPERATURE,
    TOP_LOGPROBS,
    WARPED,
    integer,
    real,
    scaled,
)

# triton leaves its decorator untyped.
_jit: Any = triton.jit

# Named tokens that are looked up at a time.
_NAMES = tl.constexpr(64)


@_jit
def _log_mass(
    masses,
    kept_masses,
    tops,
    top,
    temperature,
    row,
    tiles,
    parts,
    warped,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return the logarithm of a row's mass: of its kept tokens, or of all."""
    if warped:
        part = tl.arange(0, PARTS)
        mass = tl.sum(tl.load(kept_masses + row * parts + part, mask=part < parts, other=0.0), 0)
    else:
        tile = tl.arange(0, TILES)
        tallest = tl.load(tops + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
        own = tl.load(masses + row * tiles + tile, mask=tile < tiles, other=0.0)
        mass = tl.sum(own * tl.exp(scaled(tallest, top, temperature).to(tl.float64)), 0)
    return tl.log(mass)


@_jit
def _bits(x, log_mass):
    """Return the log-probability of scaled logits, as the bits of float32."""
    return (x.to(tl.float64) - log_mass).to(tl.float32).to(tl.int32, bitcast=True)


@_jit
def _last_kept(source, tops, width, tiles, top, temperature, edge, tied, BLOCK: tl.constexpr):
    """Return the last of the first `tied` tokens that are equal to the edge."""
    seen = tl.zeros([], tl.int32)
    last = tl.zeros([], tl.int32) - 1
    for tile in range(tiles):
        if scaled(tl.load(tops + tile), top, temperature) >= edge:
            at = tile * BLOCK + tl.arange(0, BLOCK)
            x = scaled(tl.load(source + at, mask=at < width, other=float("-inf")), top, temperature)
            equal = ((x == edge) & (at < width)).to(tl.int32)
            kept = (equal != 0) & (seen + tl.cumsum(equal, 0) <= tied)
            last = tl.maximum(last, tl.max(tl.where(kept, at, -1), 0))
            seen += tl.sum(equal, 0)
    return last


@_jit
def report(
    to,
    token,
    source,
    tops,
    masses,
    kept_masses,
    edges,
    ties,
    lists,
    records,
    row,
    top,
    most,
    width,
    tiles,
    parts,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a row's report as 4-byte words: the log-probability of its token, those of the `most` most probable ones,
    the ids of these, and the log-probabilities of the tokens that it has named. Impossible ones have -inf."""
    warped = integer(records, row, LOGPROBS) == WARPED
    temperature = real(records, row, TEMPERATURE).to(tl.float32)
    log_mass = _log_mass(masses, kept_masses, tops, top, temperature, row, tiles, parts, warped, TILES, PARTS)
    tl.store(to, _bits(scaled(tl.load(source + token), top, temperature), log_mass))
    edge = tl.zeros([], tl.float32) + float("-inf")
    tied = tl.zeros([], tl.int32) + width
    if warped:
        edge = tl.load(edges + row)
        tied = tl.load(ties + row)
    tile = tl.arange(0, TILES)
    # The largest of each tile of what was not written yet: that comes after the last one in the order of tokens.
    left = scaled(tl.load(tops + row * tiles + tile, mask=tile < tiles, other=float("-inf")), top, temperature)
    last = tl.zeros([], tl.float32) + float("inf")
    last_at = tl.zeros([], tl.int32) - 1
    equal = tl.zeros([], tl.int32)
    # No more than there is room for.
    for i in range(tl.minimum(integer(records, row, TOP_LOGPROBS).to(tl.int32), most)):
        value = tl.max(left, 0)
        own = tl.min(tl.where(left == value, tile, TILES), 0)
        at = own * BLOCK + tl.arange(0, BLOCK)
        x = scaled(tl.load(source + at, mask=at < width, other=float("-inf")), top, temperature)
        written_at = tl.where(value < last, -1, last_at)
        found = tl.min(tl.where((x == value) & (at > written_at), at, 2147483647), 0)
        equal += (value == edge).to(tl.int32)
        is_kept = (value > edge) | ((value == edge) & (equal <= tied))
        written = tl.where(is_kept & (value > float("-inf")), value, float("-inf"))
        tl.store(to + 1 + i, _bits(written, log_mass))
        tl.store(to + 1 + most + i, found)
        later = (x < value) | ((x == value) & (at > found))
        left = tl.where(tile == own, tl.max(tl.where(later, x, float("-inf")), 0), left)
        last = value
        last_at = found
    count = integer(records, row, NAME_COUNT).to(tl.int32)
    if count > 0:
        last_kept = tl.zeros([], tl.int32) + width
        if tied < width:
            last_kept = _last_kept(source, tops + row * tiles, width, tiles, top, temperature, edge, tied, BLOCK)
        names = lists + integer(records, row, NAMED)
        for start in range(0, count, _NAMES):
            place = start + tl.arange(0, _NAMES)
            at = tl.load(names + place, mask=place < count, other=0).to(tl.int32)
            x = scaled(tl.load(source + at, mask=place < count, other=float("-inf")), top, temperature)
            kept = (x > edge) | ((x == edge) & (at <= last_kept))
            bits = _bits(tl.where(kept, x, float("-inf")), log_mass)
            tl.store(to + 1 + 2 * most + place, bits, mask=place < count)
