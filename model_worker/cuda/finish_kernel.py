"""Triton kernels behind a draw: bad rows lose their tokens, and tokens go where the next step finds them.

Knows columns; knows no requests and no batch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

BLOCK = 128
# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit(do_not_specialize=["count"])
def finish_kernel(tokens, top, count, BLOCK: tl.constexpr):
    """Put -1 where a row's largest logit is not finite. Programs: block of rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.load(top + at, mask=at < count, other=0.0).to(tl.float32)
    # No number differs from itself, nor from infinity by none.
    bad = (largest - largest) != 0
    tl.store(tokens + at, tl.full([BLOCK], -1, tl.int64), mask=(at < count) & bad)


@_jit(do_not_specialize=["places", "count"])
def keep_kernel(last_tokens, places, tokens, count, BLOCK: tl.constexpr):
    """Put tokens into their places; 0 for a bad row. Programs: block of rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + at, mask=at < count, other=0)
    tl.store(last_tokens + tl.load(places + at, mask=at < count, other=0), tl.maximum(token, 0), mask=at < count)
