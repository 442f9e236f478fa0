"""A Triton kernel that copies words, to learn whether the device reads memory of the host where it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from model_worker.device_copy import HostRing

# triton leaves its decorator untyped.
_jit: Any = triton.jit
_WORDS = 64


@_jit
def words_kernel(to, words, WORDS: tl.constexpr):
    """Copy WORDS words."""
    at = tl.arange(0, WORDS)
    tl.store(to + at, tl.load(words + at))


def words_arrive(device: torch.device) -> bool:
    """Whether a kernel on the device finds the words that lie in pinned memory of the host."""
    words = np.random.default_rng(0).integers(-(1 << 31), 1 << 31, _WORDS, dtype=np.int64).astype(np.int32)
    there = torch.zeros(_WORDS, dtype=torch.int32, device=device)
    with HostRing(device, 1).lent(words) as lent:
        words_kernel[(1,)](there, lent, WORDS=_WORDS)
        return np.array_equal(there.cpu().numpy(), words)
