"""A Triton kernel that reads all logits once: it applies masks, penalties and rules, and finds the largest of each
tile.

With these the other kernels of a draw skip tiles that have nothing to draw from. For rows that report log-probabilities
it sums up each tile, too. Rules give way where they leave a row no token, as `token_rules.py` says: the last program of
such a row does it again. Knows columns; knows no requests and no batch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from model_worker.cuda import draw_record
from model_worker.cuda.draw_rows import (
    CHANGED,
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
_RESTRICTED = tl.constexpr(draw_record.RESTRICTED)
_LIMITED = tl.constexpr(draw_record.LIMITED)
# Rules that are applied at a time.
_RULES = tl.constexpr(128)
# What a program adds to its row's count of arrivals if its part has a token that is left.
_LEFT = tl.constexpr(1 << 16)


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
    """Return a row's logits at some tokens, masked, and with COPY penalised, if the row has counts."""
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
    holds,
    restricts,
    adds,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write a part of a row, from token `start` on, as the row's rules have it: with `adds` biases are added, and -inf
    is what may not come. `holds`: the row may not end. `restricts`: tokens are bad, or others are allowed."""
    limited = (integer(records, row, RESTRICTS) & _LIMITED) != 0
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
        x = tl.where(adds, x + (rule >> 32).to(tl.int32).to(tl.float32, bitcast=True), x)
        forbidden = holds & ((rule & _STOPS) != 0)
        forbidden = forbidden | (restricts & ((rule & _BAD) != 0))
        forbidden = forbidden | (restricts & limited & ((rule & _ALLOWED) == 0))
        tl.store(to + at, tl.where(forbidden, float("-inf"), x), mask=own)
    tl.debug_barrier()


@_jit
def _write_extremes(tops, firsts, masses, x, at, place, reports, temperature):
    """Write what is known of a tile."""
    largest = tl.max(tl.where(x == x, x, float("-inf")), 0)
    first = tl.min(tl.where(x == largest, at, 2147483647), 0)
    is_number = tl.sum((x != x).to(tl.int32), 0) == 0
    tl.store(tops + place, tl.where(is_number, largest, float("nan")))
    tl.store(firsts + place, first)
    if reports:
        below = tl.where(x > float("-inf"), scaled(x, largest, temperature), float("-inf"))
        tl.store(masses + place, tl.sum(tl.exp(below).to(tl.float64), 0))


@_jit
def _give_way(
    tops,
    firsts,
    masses,
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
    width,
    tiles,
    holds,
    restricts,
    reports,
    temperature,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write a whole row again, whose rules leave nothing.

    Stage 0 finds whether all but the ends is -inf by itself: then the row may end. Stage 1 tries again with what
    restricts tokens, and stage 2 is without.
    """
    stage = tl.where(holds, 0, 1)
    while stage < 3:
        left = tl.zeros([], tl.int32)
        for start in range(0, tiles * BLOCK, BLOCK * BLOCKS):
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
                holds,
                restricts & (stage == 1),
                stage > 0,
                BLOCK,
                BLOCKS,
            )
            for tile in range(start // BLOCK, tl.minimum(start // BLOCK + BLOCKS, tiles)):
                at = tile * BLOCK + tl.arange(0, BLOCK)
                x = tl.load(to + at, mask=at < width, other=float("-inf"))
                _write_extremes(tops, firsts, masses, x, at, row * tiles + tile, reports, temperature)
                left += tl.sum((x != float("-inf")).to(tl.int32), 0)
        # All threads have read before the next stage writes.
        tl.debug_barrier()
        holds = holds & ((stage > 0) | (left > 0))
        stage = tl.where((stage > 0) & (left > 0), 3, stage + 1)


@_jit(do_not_specialize=["words", "tiles", "masked"])
def extremes_kernel(
    tops,
    firsts,
    masses,
    arrived,
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
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Find the largest logit of each tile of BLOCK tokens, NaN if one is no number, and its first token; and for rows
    that report as TEMPERED the sum of exponentials of what is below it, scaled.

    Where `masked` is not 0 the forbidden logits become -inf in place; with COPY `changed` gets the logits of rows that
    have a place there, as float32, penalised and as rules have them. `arrived` i32[rows] is 0 before and after.
    Programs: row, part of BLOCKS tiles.
    """
    row = tl.program_id(0)
    source = logits + row.to(tl.int64) * row_stride
    mask = tl.where(masked != 0, integer(records, row, MASK), -1)
    reports = integer(records, row, LOGPROBS) == TEMPERED
    temperature = real(records, row, TEMPERATURE).to(tl.float32)
    start = tl.program_id(1) * BLOCKS * BLOCK
    place = integer(records, row, CHANGED)
    slot = integer(records, row, SLOT)
    to = changed + place * changed_stride
    has_rules = False
    if COPY:
        has_rules = integer(records, row, RULE_COUNT) > 0
        holds = integer(records, row, POSITION) < integer(records, row, MAY_STOP_AT)
        restricts = (integer(records, row, RESTRICTS) & _RESTRICTED) != 0
        if has_rules:
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
                holds,
                restricts,
                True,
                BLOCK,
                BLOCKS,
            )
    left = tl.zeros([], tl.int32)
    for block in range(BLOCKS):
        tile = tl.program_id(1) * BLOCKS + block
        at = tile * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        if has_rules:
            x = tl.load(to + at, mask=inside, other=float("-inf")).to(tl.float32)
            left += tl.sum((x != float("-inf")).to(tl.int32), 0)
        else:
            x = _logits(source, records, row, masks, mask, words, counts, slot, count_stride, at, inside, COPY)
            if COPY:  # noqa: SIM102 - it is known when this is compiled, and the place is not
                if place >= 0:
                    tl.store(to + at, x, mask=inside)
        if tile < tiles:
            _write_extremes(tops, firsts, masses, x, at, row * tiles + tile, reports, temperature)
    if COPY:  # noqa: SIM102
        if has_rules:
            # All threads have written before one of them counts.
            tl.debug_barrier()
            counted = 1 + tl.where(left > 0, _LEFT, 0)
            found = tl.atomic_add(arrived + row, counted, sem="acq_rel") + counted
            if found % _LEFT == tl.num_programs(1):
                tl.store(arrived + row, 0)
                if found < _LEFT:
                    _give_way(
                        tops,
                        firsts,
                        masses,
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
                        width,
                        tiles,
                        holds,
                        restricts,
                        reports,
                        temperature,
                        BLOCK,
                        BLOCKS,
                    )
