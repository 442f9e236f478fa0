"""A Triton kernel of RMS norms, in one launch where modules take six. Knows rows; knows no model."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

# How the weight is multiplied: after the result was rounded to its dtype (Llama), before it (OLMo 2), or before it and
# with one added (Gemma).
ROUNDED, FLOAT, PLUS_ONE = range(3)
FORMS = (ROUNDED, FLOAT, PLUS_ONE)
# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit(do_not_specialize=["row_stride"])
def norm_kernel(
    out,
    x,
    weight,
    row_stride,
    epsilon,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Normalise one row. Programs: row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDE)
    values = tl.load(x + row * row_stride + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + epsilon)
    factor = tl.load(weight + at, mask=at < WIDTH, other=0.0)
    kind = out.dtype.element_ty
    if FORM == 0:
        result = (values * scale).to(kind).to(tl.float32) * factor.to(tl.float32)
    elif FORM == 1:
        result = values * scale * factor.to(tl.float32)
    else:
        result = values * scale * (1.0 + factor.to(tl.float32))
    tl.store(out + row * WIDTH + at, result.to(kind), mask=at < WIDTH)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, form: int) -> Tensor:
    """Normalise the last dimension, and multiply by the weight."""
    width = x.shape[-1]
    rows = (x if x.stride(-1) == 1 else x.contiguous()).reshape(-1, width)
    out = x.new_empty(x.shape)
    wide = triton.next_power_of_2(width)
    norm_kernel[(rows.shape[0],)](
        out, rows, weight, rows.stride(0), epsilon, WIDTH=width, WIDE=wide, FORM=form, num_warps=4 if wide < 4096 else 8
    )
    return out
