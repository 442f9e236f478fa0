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


@_jit(do_not_specialize=["size"])
def gate_kernel(out, gate, up, size, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """Compute a block of elements. The activation is rounded to the dtype, as modules round it."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + at, mask=at < size, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        active = x / (1.0 + tl.exp(-x))
    else:
        # tanh(y) is 2 / (1 + exp(-2y)) - 1.
        y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        active = x / (1.0 + tl.exp(-2.0 * y))
    kind = out.dtype.element_ty
    other = tl.load(up + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + at, (active.to(kind).to(tl.float32) * other).to(kind), mask=at < size)


def gated(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """Return act(gate) * up."""
    gate = gate.contiguous()
    out = gate.new_empty(gate.shape)
    programs = -(-out.numel() // _BLOCK)
    gate_kernel[(programs,)](out, gate, up.contiguous(), out.numel(), BLOCK=_BLOCK, ACTIVATION=activation)
    return out
