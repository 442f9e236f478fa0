"""A Triton kernel of products with experts' weights in four or eight bits: one launch for all tokens and experts.

Knows elements only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_worker.cuda.grouped_linear import Packed, step_of
from model_worker.cuda.grouped_sum import sum_of_steps
from model_worker.cuda.product_tiles import PIECE_OUTPUTS
from model_worker.cuda.program_tiles import pairs_of_tile
from model_worker.cuda.routing import Routing

# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit(do_not_specialize=["per_token"])
def grouped_experts_kernel(
    out,
    x,
    codes,
    scales,
    zeros,
    order,
    bias,
    pairs,
    experts,
    firsts,
    ends,
    per_token,
    outputs,
    width,
    groups,
    ORDERED: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    MIDDLE: tl.constexpr,
    TABLE: tl.constexpr,
    STEP: tl.constexpr,
    PER_GROUP: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply tiles of pairs (routing.py) by their expert's weight. Pair p has the input `p // per_token`.

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
        total = sum_of_steps(
            x + pair // per_token * width,
            has_row,
            codes + of_expert * (width * BITS // 8),
            scales + of_expert * groups,
            zeros + of_expert * groups,
            order + expert * width,
            has_column,
            0,
            width // STEP,
            ORDERED,
            BITS,
            KIND,
            MIDDLE,
            TABLE,
            STEP,
            PER_GROUP,
            ROWS,
            COLUMNS,
        )
        if BIASED:
            total += tl.load(bias + of_expert, mask=has_column, other=0.0).to(tl.float32)[:, None]
        to = out + pair[None, :] * outputs + column[:, None]
        tl.store(to, total.to(out.dtype.element_ty), mask=has_column[:, None] & has_row[None, :])


def multiply_experts(
    x: Tensor, weight: Packed, order: Tensor | None, bias: Tensor | None, routing: Routing, experts: int
) -> Tensor:
    """Multiply pairs of tokens and experts by the weights of these, [experts * out, in], and add their biases
    [experts, out]. Returns [pairs, out].

    `x` [T, in] are tokens, or the pairs themselves. Column i of an expert's weight is for the input `order[expert, i]`,
    if there is an order, i32 [experts, in].
    """
    width = x.shape[1]
    outputs, groups = len(weight.codes) // experts, weight.scales.shape[1]
    step = step_of(width // groups)
    out = torch.empty(len(routing.pairs), outputs, dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    grouped_experts_kernel[(len(routing.experts), -(-outputs // PIECE_OUTPUTS))](
        out,
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if order is None else order,
        weight.scales if bias is None else bias,
        routing.pairs,
        routing.experts,
        routing.firsts,
        routing.ends,
        len(routing.pairs) // len(x),
        outputs,
        width,
        groups,
        ORDERED=order is not None,
        BITS=weight.coding.bits,
        KIND=weight.kind,
        MIDDLE=weight.coding.middle,
        TABLE=int.from_bytes(weight.coding.table, "little"),
        STEP=step,
        PER_GROUP=width // groups // step,
        BIASED=bias is not None,
        ROWS=routing.rows,
        COLUMNS=PIECE_OUTPUTS,
        num_warps=4,
        num_stages=4,
    )
    return out
