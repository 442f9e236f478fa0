"""A Triton kernel that puts the K and V of a step's tokens into their slots, in one launch.

Knows strides and slots; knows no batch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit(do_not_specialize=["k", "k_token", "k_head", "v", "v_token", "v_head", "slots"])
def write_kernel(
    k_cache,
    v_cache,
    k,
    v,
    slots,
    k_token,
    k_head,
    v_token,
    v_head,
    k_block,
    k_offset,
    k_cache_head,
    v_block,
    v_offset,
    v_cache_head,
    PAGE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_WIDE: tl.constexpr,
    V_WIDE: tl.constexpr,
):
    """Write one head of one token. Programs: token, K/V head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    block = slot // PAGE
    offset = slot % PAGE
    wide = tl.arange(0, K_WIDE)
    values = tl.load(k + token * k_token + head * k_head + wide, mask=wide < K_DIM)
    tl.store(k_cache + block * k_block + offset * k_offset + head * k_cache_head + wide, values, mask=wide < K_DIM)
    wide = tl.arange(0, V_WIDE)
    values = tl.load(v + token * v_token + head * v_head + wide, mask=wide < V_DIM)
    tl.store(v_cache + block * v_block + offset * v_offset + head * v_cache_head + wide, values, mask=wide < V_DIM)
