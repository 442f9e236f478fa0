"""A Triton kernel between the product that makes queries, keys and values, and attention: one launch for all of it.

It normalises the heads of queries and keys where a model does, turns them by the angles of their positions, leaves
queries in their place, and puts keys and values into the cache. Knows strides and slots; knows no batch and no model.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from model_worker.cuda.norm_kernel import weighted

# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit(do_not_specialize=["row_stride", "angle_stride", "cos", "sin", "slots"])
def rotary_kernel(
    rows,
    k_cache,
    v_cache,
    cos,
    sin,
    slots,
    q_weight,
    k_weight,
    epsilon,
    row_stride,
    angle_stride,
    k_block,
    k_offset,
    k_cache_head,
    v_block,
    v_offset,
    v_cache_head,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_WIDE: tl.constexpr,
    REST_WIDE: tl.constexpr,
    V_WIDE: tl.constexpr,
    NORM: tl.constexpr,
    FORM: tl.constexpr,
):
    """Compute one head of one token. A row has its query heads, then its keys, then its values. Programs: token, head
    of queries or keys.

    The first 2 HALF elements of a head turn, element i with element HALF + i; REST_WIDE is 0 where these are all.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    kind = rows.dtype.element_ty
    row = rows + token * row_stride
    x = row + head * K_DIM
    at = tl.arange(0, HALF_WIDE)
    turns = at < HALF
    first = tl.load(x + at, mask=turns, other=0.0).to(tl.float32)
    second = tl.load(x + HALF + at, mask=turns, other=0.0).to(tl.float32)
    if REST_WIDE:
        more = 2 * HALF + tl.arange(0, REST_WIDE)
        rest = tl.load(x + more, mask=more < K_DIM, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 0) + tl.sum(second * second, 0)
        if REST_WIDE:
            squares += tl.sum(rest * rest, 0)
        scale = tl.rsqrt(squares / K_DIM + epsilon)
        of_query = head < Q_HEADS
        # One of the two loads brings the weights, the other one zeros.
        of_first = tl.load(q_weight + at, mask=turns & of_query, other=0.0).to(tl.float32)
        of_first += tl.load(k_weight + at, mask=turns & (head >= Q_HEADS), other=0.0).to(tl.float32)
        of_second = tl.load(q_weight + HALF + at, mask=turns & of_query, other=0.0).to(tl.float32)
        of_second += tl.load(k_weight + HALF + at, mask=turns & (head >= Q_HEADS), other=0.0).to(tl.float32)
        first = weighted(first * scale, of_first, rows, FORM).to(kind).to(tl.float32)
        second = weighted(second * scale, of_second, rows, FORM).to(kind).to(tl.float32)
        if REST_WIDE:
            of_rest = tl.load(q_weight + more, mask=(more < K_DIM) & of_query, other=0.0).to(tl.float32)
            of_rest += tl.load(k_weight + more, mask=(more < K_DIM) & (head >= Q_HEADS), other=0.0).to(tl.float32)
            rest = weighted(rest * scale, of_rest, rows, FORM)
    angles = token * angle_stride + at
    cos_first = tl.load(cos + angles, mask=turns, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + angles, mask=turns, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + HALF + angles, mask=turns, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + HALF + angles, mask=turns, other=0.0).to(tl.float32)
    to = x
    if head >= Q_HEADS:
        slot = tl.load(slots + token)
        block = slot // PAGE
        offset = slot % PAGE
        kv_head = head - Q_HEADS
        to = k_cache + block * k_block + offset * k_offset + kv_head * k_cache_head
        wide = tl.arange(0, V_WIDE)
        value = tl.load(row + (Q_HEADS + KV_HEADS) * K_DIM + kv_head * V_DIM + wide, mask=wide < V_DIM)
        to_value = v_cache + block * v_block + offset * v_offset + kv_head * v_cache_head
        tl.store(to_value + wide, value, mask=wide < V_DIM)
    tl.store(to + at, (first * cos_first - second * sin_first).to(kind), mask=turns)
    tl.store(to + HALF + at, (second * cos_second + first * sin_second).to(kind), mask=turns)
    if REST_WIDE:
        tl.store(to + more, rest.to(kind), mask=more < K_DIM)


def rotate_and_write(
    rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    angles: tuple[Tensor, Tensor],
    slots: Tensor,
    q_heads: int,
    norms: tuple[Tensor, Tensor] | None = None,
    epsilon: float = 0.0,
    form: int = 0,
) -> Tensor:
    """Turn the queries in `rows` [T, queries, keys and values] in their place, and write turned keys and the values.

    `angles` are cosines and sines [T, turning elements of a head], `norms` the weights of the heads' norms. Returns the
    queries [T, q_heads, head].
    """
    cos, sin = angles
    _, page, kv_heads, k_dim = k_cache.shape
    v_dim = v_cache.shape[3]
    half = cos.shape[1] // 2
    rest = k_dim - 2 * half
    q_weight, k_weight = norms or (rows, rows)
    rotary_kernel[(rows.shape[0], q_heads + kv_heads)](
        rows,
        k_cache,
        v_cache,
        cos,
        sin,
        slots,
        q_weight,
        k_weight,
        epsilon,
        rows.stride(0),
        cos.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        PAGE=page,
        K_DIM=k_dim,
        V_DIM=v_dim,
        HALF=half,
        HALF_WIDE=triton.next_power_of_2(half),
        REST_WIDE=triton.next_power_of_2(rest) if rest else 0,
        V_WIDE=triton.next_power_of_2(v_dim),
        NORM=norms is not None,
        FORM=form,
        num_warps=1,
    )
    queries: Tensor = rows[:, : q_heads * k_dim].unflatten(1, (q_heads, k_dim))
    return queries
