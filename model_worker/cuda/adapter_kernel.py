"""Triton kernels that add low-rank products to rows, each row by the factors of its own slot. Knows addresses only.

A table has the factors of a linear layer by slot: where A [rank, in] and B [out, rank] lie, the rank, and the bits of a
scale. A column has the slot of each row; a row without one has -1, and its programs leave at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# The numbers of a slot in a table.
FIELDS = 4
MOST_RANK = 64
# Ranks of a program, inputs that it reads at a time, and outputs of a program.
_RANKS = 16
_INPUTS = 256
_OUTPUTS = 128
# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit(do_not_specialize=["x_row"])
def shrink_kernel(
    inner,
    x,
    table,
    column,
    width,
    x_row,
    FIELDS: tl.constexpr,
    MOST_RANK: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Multiply a row by some rows of its A: f32 [rows, MOST_RANK]. Programs: row, tile of ranks."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(column + row).to(tl.int64)
    if slot >= 0:
        rank = tl.load(table + slot * FIELDS + 2).to(tl.int32)
        at_rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
        if tl.program_id(1) * RANKS < rank:
            a = tl.load(table + slot * FIELDS).to(tl.pointer_type(x.dtype.element_ty))
            total = tl.zeros([RANKS, INPUTS], tl.float32)
            for start in range(0, width, INPUTS):
                at = start + tl.arange(0, INPUTS)
                value = tl.load(x + row * x_row + at, mask=at < width, other=0.0).to(tl.float32)
                inside = (at_rank < rank)[:, None] & (at < width)[None, :]
                factor = tl.load(a + at_rank[:, None] * width + at[None, :], mask=inside, other=0.0)
                total += factor.to(tl.float32) * value[None, :]
            tl.store(inner + row * MOST_RANK + at_rank, tl.sum(total, 1))


@_jit(do_not_specialize=["y_row"])
def expand_kernel(
    y,
    inner,
    table,
    column,
    outputs,
    y_row,
    FIELDS: tl.constexpr,
    MOST_RANK: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Add the product of what `shrink_kernel` gave and B, scaled, to some outputs of a row. Programs: row, tile."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(column + row).to(tl.int64)
    if slot >= 0:
        rank = tl.load(table + slot * FIELDS + 2).to(tl.int32)
        if rank > 0:
            b = tl.load(table + slot * FIELDS + 1).to(tl.pointer_type(y.dtype.element_ty))
            scale = tl.load(table + slot * FIELDS + 3).to(tl.int32).to(tl.float32, bitcast=True)
            output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
            has_output = output < outputs
            total = tl.zeros([OUTPUTS, RANKS], tl.float32)
            for first in range(0, rank, RANKS):
                at = first + tl.arange(0, RANKS)
                value = tl.load(inner + row * MOST_RANK + at, mask=at < rank, other=0.0)
                inside = has_output[:, None] & (at < rank)[None, :]
                factor = tl.load(b + output.to(tl.int64)[:, None] * rank + at[None, :], mask=inside, other=0.0)
                total += factor.to(tl.float32) * value[None, :]
            to = y + row * y_row + output
            sum = tl.load(to, mask=has_output, other=0.0).to(tl.float32) + scale * tl.sum(total, 1)
            tl.store(to, sum.to(y.dtype.element_ty), mask=has_output)


def add_low_rank(y: Tensor, x: Tensor, table: Tensor, column: Tensor) -> None:
    """Add to rows y [T, out] what the factors of their slots make of x [T, in]. Both have elements side by side.

    `table` is i64 [slots, FIELDS], `column` i32 [T].
    """
    rows, width = x.shape
    outputs = y.shape[1]
    inner = torch.empty(rows, MOST_RANK, device=x.device)
    sizes = {"FIELDS": FIELDS, "MOST_RANK": MOST_RANK, "RANKS": _RANKS}
    shrink_kernel[(rows, MOST_RANK // _RANKS)](inner, x, table, column, width, x.stride(0), **sizes, INPUTS=_INPUTS)
    expand_kernel[(rows, -(-outputs // _OUTPUTS))](
        y, inner, table, column, outputs, y.stride(0), **sizes, OUTPUTS=_OUTPUTS
    )
