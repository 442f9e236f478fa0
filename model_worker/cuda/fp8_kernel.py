"""A Triton kernel that rounds tokens to FP8, each with a scale of its own, in one launch. Knows elements only."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit(do_not_specialize=["width"])
def round_kernel(codes, scales, x, width, LARGEST: tl.constexpr, LEAST_SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Round a row of `width` elements: its largest becomes LARGEST. With NaN in it its scale is NaN. Programs: row."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros([BLOCK], tl.float32)
    wrong = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(value))
        wrong += value * 0.0  # NaN for what is not finite
    scale = tl.maximum(tl.max(most, 0) / LARGEST, LEAST_SCALE) + tl.sum(wrong, 0)
    tl.store(scales + row, scale)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32) / scale
        inside = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
        tl.store(codes + row * width + at, inside.to(codes.dtype.element_ty), mask=at < width)


def round_tokens(rows: Tensor, largest: float, least_scale: float) -> tuple[Tensor, Tensor]:
    """Return rows [T, width], whose elements lie side by side, as e4m3, and their scales f32[T, 1]."""
    count, width = rows.shape
    codes = torch.empty(count, width, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(count, 1, dtype=torch.float32, device=rows.device)
    round_kernel[(count,)](codes, scales, rows, width, LARGEST=largest, LEAST_SCALE=least_scale, BLOCK=_BLOCK)
    return codes, scales
