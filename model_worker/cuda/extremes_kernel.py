"""A Triton kernel that reads all logits once: it applies masks and penalties, and finds the largest of each tile.

With these the other kernels of a draw skip tiles that have nothing to draw from. Knows columns; knows no requests and
no batch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from model_worker.cuda.draw_rows import (
    FREQUENCY,
    MASK,
    POSITION,
    PRESENCE,
    REPETITION,
    SLOT,
    WHOLE_SEQUENCE,
    integer,
    real,
)

# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit
def _allowed(x, source, words, at, covered):
    """Put -inf where a row's bit is 0, here and in memory."""
    bits = tl.load(words + at // 32, mask=covered, other=-1)
    forbidden = covered & (((bits >> (at % 32)) & 1) == 0)
    lowest = tl.zeros_like(x) + float("-inf")
    tl.store(source + at, lowest.to(source.dtype.element_ty), mask=forbidden)
    return tl.where(forbidden, float("-inf"), x)


@_jit
def _penalised(x, number, records, row):
    """Penalise tokens that were counted; repetition comes first where the prompt is counted, too, and else last."""
    in_prompt = integer(records, row, WHOLE_SEQUENCE) != 0
    repetition = real(records, row, REPETITION).to(tl.float32)
    before = tl.where(in_prompt, repetition, 1.0)
    after = tl.where(in_prompt, 1.0, repetition)
    length = tl.maximum(integer(records, row, POSITION), 1).to(tl.float64)
    frequency = real(records, row, FREQUENCY)
    frequency = tl.where(in_prompt, frequency / length, frequency).to(tl.float32)
    taken = frequency.to(tl.float64) * number.to(tl.float64) + real(records, row, PRESENCE)
    changed = tl.where(x < 0, x * before, tl.div_rn(x, tl.zeros_like(x) + before))
    changed = changed - taken.to(tl.float32)
    changed = tl.where(changed < 0, changed * after, tl.div_rn(changed, tl.zeros_like(x) + after))
    return tl.where(number > 0, changed, x)


@_jit(do_not_specialize=["words", "tiles", "masked", "penalised"])
def extremes_kernel(
    tops,
    firsts,
    changed,
    logits,
    records,
    masks,
    counts,
    row_stride,
    changed_stride,
    count_stride,
    width,
    words,
    tiles,
    masked,
    penalised,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Find the largest logit of each tile of BLOCK tokens, NaN if one is no number, and its first token.

    Where `masked` is not 0 the forbidden logits become -inf in place; with COPY `changed` gets the logits as float32,
    and where `penalised` is not 0 penalised. Programs: row, part of BLOCKS tiles.
    """
    row = tl.program_id(0)
    source = logits + row.to(tl.int64) * row_stride
    mask = tl.where(masked != 0, integer(records, row, MASK), -1)
    slot = tl.where(penalised != 0, integer(records, row, SLOT), -1)
    for block in range(BLOCKS):
        tile = tl.program_id(1) * BLOCKS + block
        at = tile * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        x = tl.load(source + at, mask=inside, other=float("-inf")).to(tl.float32)
        if mask >= 0:
            x = _allowed(x, source, masks + mask * words, at, inside & (at // 32 < words))
        if COPY:
            if slot >= 0:
                number = tl.load(counts + slot * count_stride + at, mask=inside, other=0)
                if tl.max(number, 0) > 0:
                    x = _penalised(x, number, records, row)
            tl.store(changed + row.to(tl.int64) * changed_stride + at, x, mask=inside)
        if tile < tiles:
            largest = tl.max(tl.where(x == x, x, float("-inf")), 0)
            first = tl.min(tl.where(x == largest, at, 2147483647), 0)
            is_number = tl.sum((x != x).to(tl.int32), 0) == 0
            tl.store(tops + row * tiles + tile, tl.where(is_number, largest, float("nan")))
            tl.store(firsts + row * tiles + tile, first)
