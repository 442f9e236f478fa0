"""Triton kernels that change rows of logits in place: grammars' bitmasks, and penalties on tokens that were counted.

Knows columns; knows no requests and no batch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit(do_not_specialize=["row_stride", "word_stride", "width", "words"])
def mask_kernel(logits, index, masks, row_stride, word_stride, width, words, BLOCK: tl.constexpr):
    """Put -inf where a row's bit is 0; tokens beyond the bits keep their logits. Programs: row, block of tokens."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    covered = (at < width) & (at // 32 < words)
    bits = tl.load(masks + row.to(tl.int64) * word_stride + at // 32, mask=covered, other=-1)
    forbidden = covered & (((bits >> (at % 32)) & 1) == 0)
    to = logits + tl.load(index + row) * row_stride + at
    lowest = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(to, lowest.to(logits.dtype.element_ty), mask=forbidden)


@_jit(do_not_specialize=["row_stride", "count_stride", "width"])
def penalty_kernel(
    logits,
    counts,
    places,
    frequency,
    presence,
    first,
    last,
    row_stride,
    count_stride,
    width,
    BLOCK: tl.constexpr,
):
    """Penalise the tokens of a row that were counted. Programs: row, block of tokens.

    `places` [2, rows]: the rows of `logits`, and those of `counts`. Repetition is divided out before the others by
    `first`, and after them by `last`; one of the two is 1.
    """
    row = tl.program_id(0)
    rows = tl.num_programs(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(counts + tl.load(places + rows + row) * count_stride + at, mask=at < width, other=0)
    if tl.max(number, 0) > 0:
        to = logits + tl.load(places + row) * row_stride + at
        x = tl.load(to, mask=number > 0, other=0.0)
        before = tl.load(first + row)
        after = tl.load(last + row)
        x = tl.where(x < 0, x * before, tl.div_rn(x, tl.zeros_like(x) + before))
        taken = tl.load(frequency + row).to(tl.float64) * number.to(tl.float64)
        taken += tl.load(presence + row).to(tl.float64)
        x = x - taken.to(tl.float32)
        x = tl.where(x < 0, x * after, tl.div_rn(x, tl.zeros_like(x) + after))
        tl.store(to, x, mask=number > 0)
