"""Numbers of a few bits that are packed into words and bytes, and groups of inputs that share a scale."""

from __future__ import annotations

import torch
from torch import Tensor

from model_worker.loading.stored import Stored

# Values of the sixteen codes of E2M1, the 4-bit float of MXFP4 and NVFP4.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
# Bits of packed numbers that divide a word.
BITS = (2, 4, 8)
WORD_BITS = 32


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack unsigned numbers of `bits` bits along the last dimension, the lowest bits first, as uint8."""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    shifts = range(0, 8, bits)
    parts = torch.stack([(data >> shift) & ((1 << bits) - 1) for shift in shifts], dim=-1)
    return parts.flatten(-2)


def nibbles(data: Tensor, high_first: bool = False) -> Tensor:
    """Unpack two numbers of each byte along the last dimension, as int32, which may index a table."""
    low = data & 15
    high = data >> 4
    return torch.stack([high, low] if high_first else [low, high], dim=-1).flatten(-2).int()


def spread(scales: Tensor, inputs: int) -> Tensor:
    """Repeat [rows, groups] to [rows, inputs]: neighbouring inputs share one; the last group may be shorter."""
    rows, groups = scales.shape
    if groups == 1:
        return scales.expand(rows, inputs)
    return scales.repeat_interleave(-(-inputs // groups), dim=1)[:, :inputs]


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2^(e - 127) of unsigned bytes (E8M0), exact as float32."""
    return torch.exp2(exponents.view(torch.uint8).float() - 127)


def check_scales(stored: Stored) -> None:
    """ValueError for scales that make no weights: all zeros, or values that are not finite."""
    values = stored.read().float()
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{stored.name} has values that are not finite: download the file anew")
    if not bool(values.any()):
        raise ValueError(f"{stored.name} is all zeros, so that all weights would be zero: download the file anew")
