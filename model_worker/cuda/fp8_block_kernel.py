"""Triton kernels of products in FP8 with scales of blocks: they round tokens, group by group, and multiply them.

A weight has a scale for each block of SIDE outputs and SIDE inputs, a token one for each group of SIDE inputs. Knows
elements only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_worker.cuda.program_tiles import pairs_of_tile, tile_of_product
from model_worker.cuda.routing import Routing

SIDE = 128
# Groups of a token that a program rounds.
_GROUPS = 8
# Tiles of tokens that are computed beside each other, so that they read the same weights from the cache.
_TOGETHER = 8
# For at most so many tokens: tokens and outputs of a tile, warps, and groups that are on their way.
TILES = ((16, 16, 32, 4, 4), (32, 32, 64, 4, 4), (1 << 31, 64, 128, 4, 3))
# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit
def round_groups_kernel(
    codes,
    scales,
    x,
    width,
    groups,
    LARGEST: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
    SIDE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Round groups of a row: the largest of each becomes LARGEST. With NaN in it its scale is NaN.

    Programs: row, piece of groups.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    value = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    wrong = tl.sum(value * 0.0, 1)  # NaN for what is not finite
    scale = tl.maximum(tl.max(tl.abs(value), 1) / LARGEST, LEAST_SCALE) + wrong
    tl.store(scales + row * groups + group, scale, mask=group < groups)
    inside = tl.minimum(tl.maximum(value / scale[:, None], -LARGEST), LARGEST)
    tl.store(codes + row * width + at, inside.to(codes.dtype.element_ty), mask=at < width)


@_jit
def sum_of_groups(
    from_a,
    a_scales,
    has_row,
    from_b,
    b_scales,
    has_column,
    width,
    groups,
    BLOCKED: tl.constexpr,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply a tile of tokens (a) by one of outputs (b): each group's sum is scaled, and added in float32.

    The pointers are where tokens, outputs and their scales begin. If not BLOCKED, an output has one scale.
    """
    at = tl.arange(0, SIDE)
    places_a = from_a[:, None] + at[None, :]
    places_b = from_b[None, :] + at[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for group in range(groups):
        left = width - group * SIDE
        a = tl.load(places_a, mask=has_row[:, None] & (at[None, :] < left), other=0.0)
        b = tl.load(places_b, mask=has_column[None, :] & (at[:, None] < left), other=0.0)
        a_scale = tl.load(a_scales + group, mask=has_row, other=0.0)
        if BLOCKED:
            b_scale = tl.load(b_scales + group, mask=has_column, other=0.0)
            total += tl.dot(a, b) * a_scale[:, None] * b_scale[None, :]
        else:
            total += tl.dot(a, b) * a_scale[:, None]
        places_a += SIDE
        places_b += SIDE
    if not BLOCKED:
        total *= tl.load(b_scales, mask=has_column, other=0.0)[None, :]
    return total


@_jit(do_not_specialize=["count"])
def block_product_kernel(
    out,
    a_codes,
    a_scales,
    b_codes,
    b_scales,
    bias,
    count,
    outputs,
    width,
    groups,
    BIASED: tl.constexpr,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Multiply a tile of `count` tokens (a) by one of outputs (b): each group's sum is scaled, and added in float32.

    Programs: tiles of TOGETHER tiles of tokens, one tile of outputs after the other.
    """
    row, column = tile_of_product(count, outputs, ROWS, COLUMNS, TOGETHER)
    has_row = row < count
    has_column = column < outputs
    total = sum_of_groups(
        a_codes + row * width,
        a_scales + row * groups,
        has_row,
        b_codes + column * width,
        b_scales + column // SIDE * groups,
        has_column,
        width,
        groups,
        True,
        SIDE,
        ROWS,
        COLUMNS,
    )
    if BIASED:
        total += tl.load(bias + column, mask=has_column, other=0.0).to(tl.float32)[None, :]
    to = out + row[:, None] * outputs + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


@_jit(do_not_specialize=["per_token"])
def block_experts_kernel(
    out,
    a_codes,
    a_scales,
    b_codes,
    b_scales,
    bias,
    pairs,
    experts,
    firsts,
    ends,
    per_token,
    outputs,
    width,
    groups,
    BLOCKED: tl.constexpr,
    BIASED: tl.constexpr,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply tiles of pairs (routing.py) by their expert's weight. Pair p has the token `p // per_token`.

    Programs: tile of pairs, tile of outputs.
    """
    first = tl.load(firsts + tl.program_id(0))
    end = tl.load(ends + tl.program_id(0))
    if first < end:
        expert = tl.load(experts + tl.program_id(0))
        pair, has_row = pairs_of_tile(pairs, first, end, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        has_column = column < outputs
        of_expert = expert * outputs + column
        token = pair // per_token
        if BLOCKED:
            from_scales = b_scales + (expert * tl.cdiv(outputs, SIDE) + column // SIDE) * groups
        else:
            from_scales = b_scales + of_expert
        total = sum_of_groups(
            a_codes + token * width,
            a_scales + token * groups,
            has_row,
            b_codes + of_expert * width,
            from_scales,
            has_column,
            width,
            groups,
            BLOCKED,
            SIDE,
            ROWS,
            COLUMNS,
        )
        if BIASED:
            total += tl.load(bias + of_expert, mask=has_column, other=0.0).to(tl.float32)[None, :]
        to = out + pair[:, None] * outputs + column[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


def round_groups(rows: Tensor, largest: float, least_scale: float) -> tuple[Tensor, Tensor]:
    """Return rows [T, width], whose elements lie side by side, as e4m3, and scales of their groups, f32[T, groups]."""
    count, width = rows.shape
    groups = -(-width // SIDE)
    codes = torch.empty(count, width, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(count, groups, dtype=torch.float32, device=rows.device)
    constants = {"LARGEST": largest, "LEAST_SCALE": least_scale, "SIDE": SIDE, "GROUPS": _GROUPS}
    round_groups_kernel[(count, -(-groups // _GROUPS))](codes, scales, rows, width, groups, **constants)
    return codes, scales


def multiply_blocks(
    tokens: Tensor, of_tokens: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply tokens e4m3 [T, in], with scales f32[T, groups], by a weight e4m3 [out, in], with scales
    f32[blocks of out, groups], and add a bias [out]. Returns [T, out] in `dtype`."""
    count, width = tokens.shape
    outputs = len(codes)
    out = torch.empty(count, outputs, dtype=dtype, device=tokens.device)
    if not count:
        return out
    _, rows, columns, warps, stages = next(tile for tile in TILES if count <= tile[0])
    sizes = count, outputs, width, scales.shape[1]
    constants = {"SIDE": SIDE, "ROWS": rows, "COLUMNS": columns, "TOGETHER": _TOGETHER, "BIASED": bias is not None}
    block_product_kernel[(-(-count // rows) * -(-outputs // columns),)](
        out,
        tokens,
        of_tokens,
        codes,
        scales,
        scales if bias is None else bias,
        *sizes,
        **constants,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def multiply_experts(
    tokens: Tensor,
    of_tokens: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    routing: Routing,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply pairs of tokens and experts by the weights of these, e4m3 [experts, out, in], and add their biases
    [experts, out]. Returns [pairs, out].

    Tokens are e4m3 [T, in], or the pairs themselves, with scales f32 [T, groups]. Weights have scales
    f32 [experts, blocks of out, groups], or [experts, out].
    """
    _, outputs, width = codes.shape
    out = torch.empty(len(routing.pairs), outputs, dtype=dtype, device=tokens.device)
    if not len(tokens):
        return out
    _, _, columns, warps, stages = next(tile for tile in TILES if routing.rows <= tile[1])
    block_experts_kernel[(len(routing.experts), -(-outputs // columns))](
        out,
        tokens,
        of_tokens,
        codes,
        scales,
        scales if bias is None else bias,
        routing.pairs,
        routing.experts,
        routing.firsts,
        routing.ends,
        len(routing.pairs) // len(tokens),
        outputs,
        width,
        of_tokens.shape[1],
        BLOCKED=scales.dim() == 3,
        BIASED=bias is not None,
        SIDE=SIDE,
        ROWS=routing.rows,
        COLUMNS=columns,
        num_warps=warps,
        num_stages=stages,
    )
    return out
