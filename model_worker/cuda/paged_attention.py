"""Triton kernels of paged attention: an online softmax over keys that are gathered through the block table.

A row of a tile is one query head of one token, and all heads of a tile share a KV head, so each key is read once for
them. Sequences of one query token (decode) and of more (prompts) have launches of their own, whose grids depend on the
numbers of sequences and tokens alone. A decode row's keys are cut into pieces of a fixed number of tokens, and
their results are merged, so that a row's arithmetic does not depend on its neighbours. Knows strides; knows no batch
and no device.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# exp(x) is exp2(x * this).
_LOG2_E = tl.constexpr(1.4426950408889634)
# The largest logit of a softmax that has seen no key. Not -inf, whose differences are NaN.
_LOWEST = tl.constexpr(-1.0e30)

# Arguments that differ from step to step: a value of them must not compile a kernel anew.
_OF_A_STEP = [
    "query_start",
    "kv_len",
    "block_tables",
    "table_stride",
    "sequences",
    "q",
    "q_token",
    "q_head",
    "out",
    "out_token",
    "part",
    "part_token",
    "part_head",
    "maximum",
    "total",
]
# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit
def _attend_tile(
    q_at,
    rows_seen,
    position,
    first,
    end,
    k,
    v,
    table,
    k_block,
    k_offset,
    v_block,
    v_offset,
    scale,
    softcap,
    maximum,
    total,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_MAIN: tl.constexpr,
    K_REST: tl.constexpr,
    V_WIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with a tile's rows to keys `first` to `end`. Returns unnormalised values, maxima and totals."""
    main = tl.arange(0, K_MAIN)
    wide = tl.arange(0, V_WIDE)
    q_main = tl.load(q_at[:, None] + main[None], mask=rows_seen[:, None] & (main < K_DIM)[None], other=0.0)
    if K_REST:
        rest = K_MAIN + tl.arange(0, K_REST)
        q_rest = tl.load(q_at[:, None] + rest[None], mask=rows_seen[:, None] & (rest < K_DIM)[None], other=0.0)
    values = tl.zeros([ROWS, V_WIDE], tl.float32)
    for start in range(first, end, TILE):
        key = start + tl.arange(0, TILE)
        there = key < end
        block = tl.load(table + key // PAGE, mask=there, other=0).to(tl.int64)
        k_at = k + block * k_block + (key % PAGE) * k_offset
        v_at = v + block * v_block + (key % PAGE) * v_offset
        keys = tl.load(k_at[None] + main[:, None], mask=there[None] & (main < K_DIM)[:, None], other=0.0)
        logits = tl.dot(q_main, keys, input_precision=PRECISION)
        if K_REST:
            keys = tl.load(k_at[None] + rest[:, None], mask=there[None] & (rest < K_DIM)[:, None], other=0.0)
            logits = tl.dot(q_rest, keys, logits, input_precision=PRECISION)
        logits = logits * scale
        if SOFTCAP:
            # tanh(x) is 2 / (1 + exp(-2x)) - 1.
            logits = softcap * (2.0 / (1.0 + tl.exp2(logits / softcap * (-2.0 * _LOG2_E))) - 1.0)
        visible = there[None] & (key[None] <= position[:, None])
        if WINDOW:
            visible = visible & (key[None] > position[:, None] - WINDOW)
        logits = tl.where(visible, logits * _LOG2_E, float("-inf"))
        larger = tl.maximum(maximum, tl.max(logits, 1))
        shrink = tl.exp2(maximum - larger)
        weights = tl.exp2(logits - larger[:, None])
        total = total * shrink + tl.sum(weights, 1)
        rows = tl.load(v_at[:, None] + wide[None], mask=there[:, None] & (wide < V_DIM)[None], other=0.0)
        values = tl.dot(weights.to(rows.dtype), rows, values * shrink[:, None], input_precision=PRECISION)
        maximum = larger
    return values, maximum, total


@_jit(do_not_specialize=_OF_A_STEP)
def decode_kernel(
    out,
    part,
    maximum,
    total,
    q,
    k,
    v,
    block_tables,
    query_start,
    kv_len,
    sinks,
    scale,
    softcap,
    q_token,
    q_head,
    out_token,
    part_token,
    part_head,
    table_stride,
    k_block,
    k_offset,
    k_head,
    v_block,
    v_offset,
    v_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_MAIN: tl.constexpr,
    K_REST: tl.constexpr,
    V_WIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one piece of the keys of a sequence with one query token, for HEADS query heads of a KV head.

    Programs: sequence, chunk of heads, piece. Where there is one piece, its results are final and go to `out`.
    """
    sequence = tl.program_id(0)
    chunks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // chunks
    token = tl.load(query_start + sequence)
    length = tl.load(kv_len + sequence)
    first = 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0)
    piece_start = tl.program_id(2) * PIECE
    begins = tl.maximum(first, piece_start)
    ends = tl.minimum(length, piece_start + PIECE)
    if (tl.load(query_start + sequence + 1) - token == 1) & (begins < ends):
        lane = tl.arange(0, ROWS)
        of_group = tl.program_id(1) % chunks * HEADS + lane
        rows_seen = (lane < HEADS) & (of_group < GROUP)
        head = kv_head * GROUP + of_group
        largest = tl.full([ROWS], _LOWEST, tl.float32)
        summed = tl.zeros([ROWS], tl.float32)
        if SINKS:  # noqa: SIM102
            # The first piece has the sink, as a key without a value.
            if begins == first:
                sink = tl.load(sinks + head, mask=rows_seen, other=0.0).to(tl.float32)
                largest = sink * _LOG2_E
                summed += 1.0
        values, largest, summed = _attend_tile(
            q + token.to(tl.int64) * q_token + head * q_head,
            rows_seen,
            tl.zeros([ROWS], tl.int32) + (length - 1),
            begins // TILE * TILE,
            ends,
            k + kv_head * k_head,
            v + kv_head * v_head,
            block_tables + sequence.to(tl.int64) * table_stride,
            k_block,
            k_offset,
            v_block,
            v_offset,
            scale,
            softcap,
            largest,
            summed,
            ROWS,
            TILE,
            PAGE,
            K_DIM,
            V_DIM,
            K_MAIN,
            K_REST,
            V_WIDE,
            WINDOW,
            SOFTCAP,
            PRECISION,
        )
        wide = tl.arange(0, V_WIDE)
        stored = rows_seen[:, None] & (wide < V_DIM)[None]
        if SPLIT:
            at = sequence.to(tl.int64) * part_token + head * part_head + tl.program_id(2)
            tl.store(maximum + at, largest, mask=rows_seen)
            tl.store(total + at, summed, mask=rows_seen)
            tl.store(part + at[:, None] * V_DIM + wide[None], values, mask=stored)
        else:
            at = out + token.to(tl.int64) * out_token + head * V_DIM
            tl.store(at[:, None] + wide[None], (values / summed[:, None]).to(out.dtype.element_ty), mask=stored)


@_jit(do_not_specialize=_OF_A_STEP)
def merge_kernel(
    out,
    part,
    maximum,
    total,
    query_start,
    kv_len,
    out_token,
    part_token,
    part_head,
    PIECE: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Merge the pieces of a decode row's query head. Programs: sequence, query head."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start + sequence)
    if tl.load(query_start + sequence + 1) - token == 1:
        length = tl.load(kv_len + sequence)
        first = 0
        if WINDOW:
            first = tl.maximum(length - WINDOW, 0) // PIECE
        last = (length - 1) // PIECE
        wide = tl.arange(0, V_WIDE)
        at = sequence.to(tl.int64) * part_token + head * part_head
        values = tl.zeros([V_WIDE], tl.float32)
        largest = tl.zeros([1], tl.float32) + _LOWEST
        summed = tl.zeros([1], tl.float32)
        for piece in range(first, last + 1):
            own = tl.load(maximum + at + piece)
            larger = tl.maximum(largest, own)
            shrink = tl.exp2(largest - larger)
            weight = tl.exp2(own - larger)
            summed = summed * shrink + tl.load(total + at + piece) * weight
            rows = tl.load(part + (at + piece) * V_DIM + wide, mask=wide < V_DIM, other=0.0)
            values = values * shrink + rows * weight
            largest = larger
        to = out + token.to(tl.int64) * out_token + head * V_DIM + wide
        tl.store(to, (values / summed).to(out.dtype.element_ty), mask=wide < V_DIM)


@_jit(do_not_specialize=_OF_A_STEP)
def prompt_kernel(
    out,
    q,
    k,
    v,
    block_tables,
    query_start,
    kv_len,
    sinks,
    sequences,
    scale,
    softcap,
    q_token,
    q_head,
    out_token,
    table_stride,
    k_block,
    k_offset,
    k_head,
    v_block,
    v_offset,
    v_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_MAIN: tl.constexpr,
    K_REST: tl.constexpr,
    V_WIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with ROWS // HEADS tokens of a sequence that has several, for HEADS query heads of a KV head.

    Programs: tile of tokens, chunk of heads. Sequence s has the tiles from query_start[s] // TOKENS + s on: as many as
    it may need, whatever the lengths are. Tiles that have no token leave at once.
    """
    TOKENS: tl.constexpr = ROWS // HEADS
    tile = tl.program_id(0)
    # The last sequence whose first tile is not after this one.
    low = tl.zeros([], tl.int32)
    high = tl.zeros([], tl.int32) + sequences
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    chunks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // chunks
    start = tl.load(query_start + low)
    count = tl.load(query_start + low + 1) - start
    length = tl.load(kv_len + low)
    begins = (tile - start // TOKENS - low) * TOKENS
    if (count > 1) & (begins < count):
        lane = tl.arange(0, ROWS)
        index = begins + lane // HEADS
        of_group = tl.program_id(1) % chunks * HEADS + lane % HEADS
        rows_seen = (lane < TOKENS * HEADS) & (index < count) & (of_group < GROUP)
        head = kv_head * GROUP + of_group
        past = length - count
        first = 0
        if WINDOW:
            first = tl.maximum(past + begins - WINDOW + 1, 0) // TILE * TILE
        largest = tl.full([ROWS], _LOWEST, tl.float32)
        summed = tl.zeros([ROWS], tl.float32)
        if SINKS:
            sink = tl.load(sinks + head, mask=rows_seen, other=0.0).to(tl.float32)
            largest = sink * _LOG2_E
            summed += 1.0
        token = (start + index).to(tl.int64)
        values, largest, summed = _attend_tile(
            q + token * q_token + head * q_head,
            rows_seen,
            past + index,
            first,
            tl.minimum(length, past + begins + TOKENS),
            k + kv_head * k_head,
            v + kv_head * v_head,
            block_tables + low.to(tl.int64) * table_stride,
            k_block,
            k_offset,
            v_block,
            v_offset,
            scale,
            softcap,
            largest,
            summed,
            ROWS,
            TILE,
            PAGE,
            K_DIM,
            V_DIM,
            K_MAIN,
            K_REST,
            V_WIDE,
            WINDOW,
            SOFTCAP,
            PRECISION,
        )
        wide = tl.arange(0, V_WIDE)
        at = out + token * out_token + head * V_DIM
        stored = rows_seen[:, None] & (wide < V_DIM)[None]
        tl.store(at[:, None] + wide[None], (values / summed[:, None]).to(out.dtype.element_ty), mask=stored)
