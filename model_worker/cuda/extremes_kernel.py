"""A Triton kernel that reads all logits once: it applies masks, penalties and rules, and finds the largest of each
tile.

With these the other kernels of a draw skip tiles that have nothing to draw from. For rows that report log-probabilities
it sums up each tile, too. Knows columns; knows no requests and no batch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from model_worker.cuda import draw_record
from model_worker.cuda.draw_rows import (
    FREQUENCY,
    LOGPROBS,
    MASK,
    MAY_STOP_AT,
    POSITION,
    PRESENCE,
    REPETITION,
    RESTRICTS,
    RULE_COUNT,
    RULES,
    SLOT,
    TEMPERATURE,
    TEMPERED,
    WHOLE_SEQUENCE,
    integer,
    real,
    scaled,
)

# triton leaves its decorator untyped.
_jit: Any = triton.jit

_TOKENS = tl.constexpr((1 << draw_record.TOKEN_BITS) - 1)
_STOPS = tl.constexpr(draw_record.STOPS)
_BAD = tl.constexpr(draw_record.BAD)
_ALLOWED = tl.constexpr(draw_record.ALLOWED)
_WHILE_FREE = tl.constexpr(draw_record.WHILE_FREE)
_WHILE_HELD = tl.constexpr(draw_record.WHILE_HELD)
_LIMITED = tl.constexpr(draw_record.LIMITED)
# Rules that are applied at a time.
_RULES = tl.constexpr(128)


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


@_jit
def _logits(source, records, row, masks, mask, words, counts, slot, count_stride, at, inside, COPY: tl.constexpr):
    """Return a row's logits at some tokens, masked, and with COPY penalised."""
    x = tl.load(source + at, mask=inside, other=float("-inf")).to(tl.float32)
    if mask >= 0:
        x = _allowed(x, source, masks + mask * words, at, inside & (at // 32 < words))
    if COPY:  # noqa: SIM102 - it is known when this is compiled, and the slot is not
        if slot >= 0:
            number = tl.load(counts + slot * count_stride + at, mask=inside, other=0)
            if tl.max(number, 0) > 0:
                x = _penalised(x, number, records, row)
    return x


@_jit
def _first_from(rules, count, token):
    """Return which of a row's rules, which come by token, is the first of this token or a later one."""
    low = count * 0
    high = count
    while low < high:
        middle = (low + high) // 2
        is_before = (tl.load(rules + middle) & _TOKENS) < token
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    return low


@_jit
def _write_ruled(
    to,
    lists,
    source,
    records,
    row,
    masks,
    mask,
    words,
    counts,
    slot,
    count_stride,
    start,
    width,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write a part of a row, from token `start` on, as the row's rules have it: biases are added, and what may not come
    is -inf."""
    is_held = integer(records, row, POSITION) < integer(records, row, MAY_STOP_AT)
    restricts = integer(records, row, RESTRICTS)
    limited = (restricts & _LIMITED) != 0
    restricts = (restricts & tl.where(is_held, _WHILE_HELD, _WHILE_FREE)) != 0
    for block in range(BLOCKS):
        at = start + block * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        x = _logits(source, records, row, masks, mask, words, counts, slot, count_stride, at, inside, True)
        tl.store(to + at, tl.where(restricts & limited, float("-inf"), x), mask=inside)
    # All threads of the program write to what others of them have written, and read it.
    tl.debug_barrier()
    rules = lists + integer(records, row, RULES)
    count = integer(records, row, RULE_COUNT)
    end = _first_from(rules, count, start + BLOCK * BLOCKS)
    for begin in range(_first_from(rules, count, start), end, _RULES):
        place = begin + tl.arange(0, _RULES)
        own = place < end
        rule = tl.load(rules + place, mask=own, other=0)
        at = (rule & _TOKENS).to(tl.int32)
        x = _logits(source, records, row, masks, mask, words, counts, slot, count_stride, at, own, True)
        x = x + (rule >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        forbidden = is_held & ((rule & _STOPS) != 0)
        forbidden = forbidden | (restricts & ((rule & _BAD) != 0))
        forbidden = forbidden | (restricts & limited & ((rule & _ALLOWED) == 0))
        tl.store(to + at, tl.where(forbidden, float("-inf"), x), mask=own)
    tl.debug_barrier()


@_jit(do_not_specialize=["words", "tiles", "masked", "penalised", "ruled"])
def extremes_kernel(
    tops,
    firsts,
    masses,
    changed,
    logits,
    records,
    masks,
    counts,
    lists,
    row_stride,
    changed_stride,
    count_stride,
    width,
    words,
    tiles,
    masked,
    penalised,
    ruled,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Find the largest logit of each tile of BLOCK tokens, NaN if one is no number, and its first token; and for rows
    that report as TEMPERED the sum of exponentials of what is below it, scaled.

    Where `masked` is not 0 the forbidden logits become -inf in place; with COPY `changed` gets the logits as float32,
    where `penalised` is not 0 penalised, and where `ruled` is not 0 as rules have them. Programs: row, part of BLOCKS
    tiles.
    """
    row = tl.program_id(0)
    source = logits + row.to(tl.int64) * row_stride
    to = changed + row.to(tl.int64) * changed_stride
    mask = tl.where(masked != 0, integer(records, row, MASK), -1)
    slot = tl.where(penalised != 0, integer(records, row, SLOT), -1)
    reports = integer(records, row, LOGPROBS) == TEMPERED
    temperature = real(records, row, TEMPERATURE).to(tl.float32)
    has_rules = False
    if COPY:
        has_rules = (ruled != 0) & (integer(records, row, RULE_COUNT) > 0)
        if has_rules:
            start = tl.program_id(1) * BLOCKS * BLOCK
            _write_ruled(
                to,
                lists,
                source,
                records,
                row,
                masks,
                mask,
                words,
                counts,
                slot,
                count_stride,
                start,
                width,
                BLOCK,
                BLOCKS,
            )
    for block in range(BLOCKS):
        tile = tl.program_id(1) * BLOCKS + block
        at = tile * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        if has_rules:
            x = tl.load(to + at, mask=inside, other=float("-inf")).to(tl.float32)
        else:
            x = _logits(source, records, row, masks, mask, words, counts, slot, count_stride, at, inside, COPY)
            if COPY:
                tl.store(to + at, x, mask=inside)
        if tile < tiles:
            largest = tl.max(tl.where(x == x, x, float("-inf")), 0)
            first = tl.min(tl.where(x == largest, at, 2147483647), 0)
            is_number = tl.sum((x != x).to(tl.int32), 0) == 0
            tl.store(tops + row * tiles + tile, tl.where(is_number, largest, float("nan")))
            tl.store(firsts + row * tiles + tile, first)
            if reports:
                below = tl.where(x > float("-inf"), scaled(x, largest, temperature), float("-inf"))
                tl.store(masses + row * tiles + tile, tl.sum(tl.exp(below).to(tl.float64), 0))
