"""Triton kernels of RMS norms, in one launch where modules take six, and of additions before them.

Knows rows; knows no model.
"""

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


@_jit
def weighted(normal, factor, like, FORM: tl.constexpr):
    """Multiply normalised float32 values by their weights, as the form has it. `like` points to values of the dtype."""
    kind = like.dtype.element_ty
    if FORM == 0:
        return normal.to(kind).to(tl.float32) * factor.to(tl.float32)
    if FORM == 1:
        return normal * factor.to(tl.float32)
    return normal * (1.0 + factor.to(tl.float32))


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
    result = weighted(values * scale, factor, out, FORM)
    tl.store(out + row * WIDTH + at, result.to(out.dtype.element_ty), mask=at < WIDTH)


@_jit
def add_norm_kernel(
    out,
    residual,
    x,
    inner,
    weight,
    epsilon,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    FORM: tl.constexpr,
    INNER: tl.constexpr,
):
    """Add a row of `x`, with INNER normalised, to `residual`, in its place, and normalise the sum. Programs: row."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, WIDE)
    inside = at < WIDTH
    kind = out.dtype.element_ty
    added = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    if INNER:
        scale = tl.rsqrt(tl.sum(added * added, 0) / WIDTH + epsilon)
        factor = tl.load(inner + at, mask=inside, other=0.0)
        added = weighted(added * scale, factor, out, FORM).to(kind).to(tl.float32)
    values = tl.load(residual + row + at, mask=inside, other=0.0).to(tl.float32) + added
    # The next layer adds to what was rounded, so that is what is normalised.
    rounded = values.to(kind)
    tl.store(residual + row + at, rounded, mask=inside)
    values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + epsilon)
    factor = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row + at, weighted(values * scale, factor, out, FORM).to(kind), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, form: int) -> Tensor:
    """Normalise the last dimension, and multiply by the weight."""
    width = x.shape[-1]
    rows = (x if x.stride(-1) == 1 else x.contiguous()).reshape(-1, width)
    out = x.new_empty(x.shape)
    sizes = _sizes(width)
    norm_kernel[(rows.shape[0],)](out, rows, weight, rows.stride(0), epsilon, FORM=form, **sizes)
    return out


def add_norm(residual: Tensor, x: Tensor, inner: Tensor | None, weight: Tensor, epsilon: float, form: int) -> Tensor:
    """Add `x`, normalised by `inner` if there is one, to `residual` [rows, width] in its place. Returns the sum's
    norm."""
    out = residual.new_empty(residual.shape)
    sizes = _sizes(residual.shape[1])
    more = {"FORM": form, "INNER": inner is not None}
    inner = weight if inner is None else inner
    add_norm_kernel[(residual.shape[0],)](out, residual, x, inner, weight, epsilon, **more, **sizes)
    return out


def _sizes(width: int) -> dict[str, int]:
    wide = triton.next_power_of_2(width)
    return {"WIDTH": width, "WIDE": wide, "num_warps": 4 if wide < 4096 else 8}
