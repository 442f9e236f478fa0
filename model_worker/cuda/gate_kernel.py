"""A Triton kernel of gated activations, act(gate) * up, in one launch. Knows elements; knows no model."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

SILU, GELU_TANH = range(2)
ACTIVATIONS = (SILU, GELU_TANH)
_BLOCK = 1024
# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit(do_not_specialize=["gate_row", "up_row", "width"])
def gate_kernel(out, gate, up, gate_row, up_row, width, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """Compute a block of a row. The activation is rounded to the dtype, as modules round it. Programs: row, block."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + row * gate_row + at, mask=at < width, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        active = x / (1.0 + tl.exp(-x))
    else:
        # tanh(y) is 2 / (1 + exp(-2y)) - 1.
        y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        active = x / (1.0 + tl.exp(-2.0 * y))
    kind = out.dtype.element_ty
    other = tl.load(up + row * up_row + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (active.to(kind).to(tl.float32) * other).to(kind), mask=at < width)


def gated(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """Return act(gate) * up. Both may be columns of a wider tensor [rows, width]."""
    width = gate.shape[-1]
    out = gate.new_empty(gate.shape)
    rows = [_rows(each, width) for each in (gate, up)]
    strides = [each.stride(0) for each in rows]
    grid = (rows[0].shape[0], -(-width // _BLOCK))
    gate_kernel[grid](out, *rows, *strides, width, BLOCK=_BLOCK, ACTIVATION=activation)
    return out


def _rows(values: Tensor, width: int) -> Tensor:
    """View as [rows, width], with the elements of a row side by side."""
    return (values if values.stride(-1) == 1 else values.contiguous()).reshape(-1, width)
