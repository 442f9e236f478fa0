"""A row's softmax, a panel of keys after the other, against all of them at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numpy.typing import NDArray

from model_worker.cpu.simd.softmax import LOG2_E, LOWEST, soften

KEYS = 64
ROW = 1


@njit(fastmath={"reassoc", "contract", "arcp", "nsz"})
def _soften(scores: Any, row: int, begin: int, end: int, scale: Any, weights: Any, peak: Any, totals: Any) -> Any:
    return soften(scores, row, begin, end, scale, weights, peak, totals)


def numbers(weights: NDArray[Any]) -> NDArray[np.float32]:
    return weights if weights.dtype == np.float32 else (weights.astype(np.uint32) << 16).view(np.float32)


panels = st.lists(st.tuples(st.integers(0, KEYS), st.integers(0, KEYS)).map(sorted), min_size=1, max_size=4)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), panels, st.sampled_from([0.01, 1.0, 30.0]), st.sampled_from([np.float32, np.uint16]))
def test_panels_add_up_to_the_softmax(seed: int, bounds: list[Any], size: float, kind: type) -> None:
    rng = np.random.default_rng(seed)
    seen: list[NDArray[np.float64]] = []
    kept: list[NDArray[np.float32]] = []
    weights: NDArray[Any]
    peak, totals = np.full(3, LOWEST, np.float32), np.zeros((3, 16), np.float32)
    for begin, end in bounds:
        scores, weights = np.full((3, KEYS), np.nan, np.float32), np.full((3, KEYS), 7, kind)
        scores[ROW, begin:end] = size * rng.normal(size=end - begin)
        shrink = _soften(scores, ROW, begin, end, np.float32(0.3 * LOG2_E), weights, peak, totals)
        kept = [shrink * part for part in kept]
        kept.append(numbers(weights)[ROW, begin:end])
        hidden = np.delete(numbers(weights)[ROW], np.s_[begin:end])
        assert (hidden == 0).all()  # although their scores are no numbers
        assert (weights[[0, 2]] == 7).all()
        seen.append(0.3 * scores[ROW, begin:end].astype(np.float64))
    every = np.concatenate(seen)
    if not len(every):
        assert (totals[ROW] == 0).all()
        return
    want, total = np.exp(every - every.max()), totals[ROW].sum()
    assert total * np.exp2(peak[ROW] - every.max() * LOG2_E) == pytest.approx(want.sum(), rel=1e-5)
    got = np.concatenate(kept) / total
    assert np.allclose(got, want / want.sum(), rtol=2e-5 if kind is np.float32 else 2**-8, atol=1e-6)
    assert (peak[[0, 2]] == np.float32(LOWEST)).all()
    assert (totals[[0, 2]] == 0).all()


def test_what_is_no_number_shows() -> None:
    scores = np.zeros((2, KEYS), np.float32)
    scores[ROW, 5] = np.nan
    weights, peak, totals = np.zeros((2, KEYS), np.float32), np.zeros(2, np.float32), np.zeros((2, 16), np.float32)
    _soften(scores, ROW, 0, KEYS, np.float32(1), weights, peak, totals)
    assert np.isnan(totals[ROW].sum())
