"""Panels of bytes become panels of words that say the same whole numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numpy.typing import NDArray

from model_worker.fusion.digits import OFFSET, WORD_BYTES
from model_worker.fusion.products import PANEL
from model_worker.fusion.widen import widen


@njit
def _widen(like: Any, panel: int, steps: int, lanes: int, to: int) -> None:
    widen(like, panel, steps, lanes, to)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 20), st.sampled_from([np.uint16, np.float32]), st.booleans(), st.integers(0, 2**32 - 1))
def test_words_say_what_bytes_say(steps: int, element: Any, whole: bool, seed: int) -> None:
    """In the order of linears.py; of half a panel, the other half stays as it is."""
    like, rng = np.empty(1, element), np.random.default_rng(seed)
    lanes, parts = PANEL if whole else PANEL // 2, 4 // like.itemsize
    panel = rng.integers(0, 256, (steps, PANEL, WORD_BYTES), dtype=np.uint8)
    words = np.full((steps * WORD_BYTES // parts, PANEL), 0x12345678, np.uint32)
    _widen(like, panel.ctypes.data, steps, lanes, words.ctypes.data)
    want = panel.transpose(0, 2, 1).reshape(steps * WORD_BYTES, PANEL).astype(np.float32) - OFFSET
    assert (_numbers(words, parts)[:, :lanes] == want[:, :lanes]).all()
    assert (words[:, lanes:] == 0x12345678).all()


def _numbers(words: NDArray[np.uint32], parts: int) -> NDArray[np.float32]:
    """[inputs, outputs] of words [step, output]."""
    if parts == 1:
        return words.view(np.float32)
    pairs = torch.from_numpy(words.view(np.int16).reshape(*words.shape, 2)).view(torch.bfloat16).float()
    return np.asarray(pairs.permute(0, 2, 1).reshape(-1, words.shape[1]).numpy())
