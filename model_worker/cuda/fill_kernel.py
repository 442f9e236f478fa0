"""Triton kernels that put a step into the memory of its recording, with padding, in one launch.

Tokens that only the device has are looked up on the way. Knows columns of batches; knows no graphs and no model.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

BLOCK = 256
# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit
def _token(tokens, owners, last_tokens, at, deferred):
    """Return a token, or the last one of the row that owns it."""
    owner = tl.load(owners + at, mask=deferred != 0, other=-1)
    last = tl.load(last_tokens + owner, mask=owner >= 0, other=0)
    return tl.where(owner >= 0, last, tl.load(tokens + at))


@_jit
def _copy_row(to, source, width, BLOCK: tl.constexpr):
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(source + at, mask=at < width), mask=at < width)


_OF_A_STEP = [
    "tokens",
    "positions",
    "slots",
    "kv_len",
    "tables",
    "owners",
    "sequences",
    "width",
    "table_row",
    "deferred",
]


@_jit(do_not_specialize=_OF_A_STEP)
def fill_decode_kernel(
    tokens_to,
    positions_to,
    slots_to,
    kv_len_to,
    tables_to,
    tokens,
    positions,
    slots,
    kv_len,
    tables,
    owners,
    last_tokens,
    sequences,
    width,
    table_row_to,
    table_row,
    spare_block,
    spare_slot,
    deferred,
    BLOCK: tl.constexpr,
):
    """Fill a row of a decode step; those from `sequences` on are one token in the spare block. Programs: row."""
    row = tl.program_id(0)
    to = tables_to + row.to(tl.int64) * table_row_to
    if row < sequences:
        tl.store(tokens_to + row, _token(tokens, owners, last_tokens, row, deferred))
        tl.store(positions_to + row, tl.load(positions + row))
        tl.store(slots_to + row, tl.load(slots + row))
        tl.store(kv_len_to + row, tl.load(kv_len + row))
        _copy_row(to, tables + row.to(tl.int64) * table_row, width, BLOCK)
    else:
        tl.store(tokens_to + row, 0)
        tl.store(positions_to + row, 0)
        tl.store(slots_to + row, spare_slot)
        tl.store(kv_len_to + row, 1)
        tl.store(to, spare_block)


@_jit(do_not_specialize=[*_OF_A_STEP, "query_start", "logit_positions", "count", "wanted", "size"])
def fill_mixed_kernel(
    tokens_to,
    positions_to,
    slots_to,
    query_start_to,
    kv_len_to,
    tables_to,
    logit_positions_to,
    tokens,
    positions,
    slots,
    query_start,
    kv_len,
    tables,
    logit_positions,
    owners,
    last_tokens,
    count,
    sequences,
    wanted,
    size,
    most_rows,
    width,
    width_to,
    table_row_to,
    table_row,
    spare_block,
    spare_slot,
    deferred,
    BLOCK: tl.constexpr,
):
    """Fill token i, sequence i and logit i of a step with prompts. Programs: i.

    Tokens from `count` to `size` are one more sequence, in the spare block; sequences behind it have no tokens.
    """
    i = tl.program_id(0)
    if i < count:
        tl.store(tokens_to + i, _token(tokens, owners, last_tokens, i, deferred))
        tl.store(positions_to + i, tl.load(positions + i))
        tl.store(slots_to + i, tl.load(slots + i))
    elif i < size:
        tl.store(tokens_to + i, 0)
        tl.store(positions_to + i, 0)
        tl.store(slots_to + i, spare_slot)
    to = tables_to + i.to(tl.int64) * table_row_to
    if i < sequences:
        tl.store(kv_len_to + i, tl.load(kv_len + i))
        _copy_row(to, tables + i.to(tl.int64) * table_row, width, BLOCK)
    elif i <= most_rows:
        tl.store(kv_len_to + i, tl.maximum(size - count, 1))
    if i == sequences:
        for start in range(0, width_to, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(to + at, tl.zeros([BLOCK], tl.int32) + spare_block, mask=at < width_to)
    if i <= sequences:
        tl.store(query_start_to + i, tl.load(query_start + i))
    elif i <= most_rows + 1:
        tl.store(query_start_to + i, size)
    if i < wanted:
        tl.store(logit_positions_to + i, tl.load(logit_positions + i))
    elif i < most_rows:
        tl.store(logit_positions_to + i, 0)
