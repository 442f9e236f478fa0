"""Large pages change where memory lies, and nothing in it."""

from __future__ import annotations

import numpy as np
import pytest

from model_worker.huge_pages import keep_in_huge_pages


@pytest.mark.parametrize("written", [True, False])
def test_contents_stay(written: bool) -> None:
    rng = np.random.default_rng()
    arrays = [rng.integers(0, 1 << 30, size) for size in (1, 1000, 100_000, 1_000_000, 3_000_000)]
    copies = [array.copy() for array in arrays]
    keep_in_huge_pages(arrays, written=written)
    for array, copy in zip(arrays, copies, strict=True):
        assert np.array_equal(array, copy)
        array += 1
        assert np.array_equal(array, copy + 1)
