"""A Triton kernel that draws in each part of a row, with noise for the tokens that are kept, and sums these up.

The noise is that of sampling/rng.py. Knows columns; knows no requests and no batch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from model_worker.cuda.draw_rows import CHANGED, LOGPROBS, POSITION, SEED, TEMPERATURE, WARPED, integer, real, scaled

# triton leaves its decorator untyped.
_jit: Any = triton.jit

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_SEED_OFFSET = tl.constexpr(0xD1B54A32D192ED03)
_POSITION_STEP = tl.constexpr(0x8CB92BA72F3D8DD7)
_STEP = tl.constexpr(2.0**-52)


@_jit
def _mix(value):
    value = (value ^ (value >> 30)) * _MIX_1
    value = (value ^ (value >> 27)) * _MIX_2
    return value ^ (value >> 31)


@_jit
def _picked(
    source,
    tops,
    edges,
    ties,
    records,
    row,
    part,
    top,
    width,
    tiles,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Return the best score in a part of a row, whose logits are `source`, its token, and the mass of kept tokens."""
    best = tl.zeros([], tl.float64) + float("-inf")
    token = tl.zeros([], tl.int64)
    mass = tl.zeros([], tl.float64)
    reports = integer(records, row, LOGPROBS) == WARPED
    temperature = real(records, row, TEMPERATURE).to(tl.float32)
    edge = tl.load(edges + row)
    tied = tl.load(ties + row)
    seed = integer(records, row, SEED).to(tl.uint64, bitcast=True)
    position = integer(records, row, POSITION).to(tl.uint64, bitcast=True)
    key = _mix(_mix(seed + _SEED_OFFSET) ^ (position * _POSITION_STEP))
    before = tl.zeros([], tl.int32)
    if tied < width:
        # Tokens equal to the edge in earlier parts, which are kept first.
        for tile in range(part * BLOCKS):
            if scaled(tl.load(tops + row * tiles + tile), top, temperature) >= edge:
                x = scaled(tl.load(source + tile * BLOCK + tl.arange(0, BLOCK)), top, temperature)
                before += tl.sum((x == edge).to(tl.int32), 0)
    for block in range(BLOCKS):
        tile = part * BLOCKS + block
        tallest = tl.load(tops + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
        if scaled(tallest, top, temperature) >= edge:
            at = tile * BLOCK + tl.arange(0, BLOCK)
            x = scaled(tl.load(source + at, mask=at < width, other=float("-inf")), top, temperature)
            equal = (x == edge) & (at < width)
            kept = (x > edge) | (equal & (before + tl.cumsum(equal.to(tl.int32), 0) <= tied))
            before += tl.sum(equal.to(tl.int32), 0)
            if reports:
                mass += tl.sum(tl.where(kept, tl.exp(x), 0.0).to(tl.float64), 0)
            if tl.sum(kept.to(tl.int32), 0) > 0:
                mixed = _mix(key + (at + 1).to(tl.uint64) * _GOLDEN)
                uniform = ((mixed >> 12).to(tl.float64) + 0.5) * _STEP
                score = tl.where(kept, x.to(tl.float64) - tl.log(-tl.log(uniform)), float("-inf"))
                largest = tl.max(score, 0)
                first = tl.min(tl.where(score == largest, at, 2147483647), 0)
                token = tl.where(largest > best, first.to(tl.int64), token)
                best = tl.maximum(best, largest)
    return best, token, mass


@_jit(do_not_specialize=["tiles", "parts"])
def pick_kernel(
    scores,
    picked,
    kept_masses,
    logits,
    changed,
    tops,
    row_tops,
    edges,
    ties,
    records,
    row_stride,
    changed_stride,
    width,
    tiles,
    parts,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Find the kept token of the largest logit and noise in a part of a row; and for rows that report as WARPED the
    sum of exponentials of the kept ones. Rows may have their logits in `changed`. Programs: row, part of BLOCKS tiles.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    source = logits + row.to(tl.int64) * row_stride
    top = tl.load(row_tops + row)
    best = tl.zeros([], tl.float64) + float("-inf")
    token = tl.zeros([], tl.int64)
    mass = tl.zeros([], tl.float64)
    if top == top:
        # Their types differ: each has its own code.
        place = integer(records, row, CHANGED)
        if place >= 0:
            own = changed + place * changed_stride
            best, token, mass = _picked(own, tops, edges, ties, records, row, part, top, width, tiles, BLOCK, BLOCKS)
        else:
            best, token, mass = _picked(source, tops, edges, ties, records, row, part, top, width, tiles, BLOCK, BLOCKS)
    tl.store(scores + row * parts + part, best)
    tl.store(picked + row * parts + part, token)
    tl.store(kept_masses + row * parts + part, mass)
