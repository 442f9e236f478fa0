"""A mask forbids exactly the tokens whose bit is not set, in every type of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_worker.grammar.apply_mask import apply_masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@settings(max_examples=30, deadline=None)
@given(width=st.integers(1, 200), seed=st.integers(0, 2**31))
def test_bits_say_what_is_allowed(dtype: torch.dtype, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = -(-width // 32)
    masks = rng.integers(-(2**31), 2**31, (2, words), dtype=np.int64).astype(np.int32)
    masks[rng.random((2, words)) < 0.3] = -1
    masks[rng.random((2, words)) < 0.2] = 0
    logits = torch.from_numpy(rng.normal(size=(4, width + 9))).to(dtype)
    before = logits.clone()
    apply_masks(logits[:, :width], np.array([3, 1]), masks)
    for row, mask in ((3, masks[0]), (1, masks[1])):
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:width].astype(bool)
        assert torch.equal(torch.isneginf(logits[row, :width]), torch.from_numpy(~allowed))
        assert torch.equal(logits[row, :width][allowed], before[row, :width][allowed])
        assert torch.equal(logits[row, width:], before[row, width:])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
