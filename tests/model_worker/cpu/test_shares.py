"""Texts of a pass are dealt to cores: each once, in order, and evenly enough that no core waits for long."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_worker.cpu.encoder.shares import PassCost, deal

# About all-MiniLM-L6-v2.
COST = PassCost(2.1e7, 9e3)
LENGTHS = st.lists(st.integers(1, 512), min_size=1, max_size=64)


def dealt(lengths: list[int], cores: int) -> tuple[int, list[int]]:
    array = np.array(lengths, np.int64)
    used, shares = deal(COST.of(array), array, cores)
    return used, shares.tolist()


@given(LENGTHS, st.integers(1, 16))
def test_each_text_is_in_one_share(lengths: list[int], cores: int) -> None:
    used, shares = dealt(lengths, cores)
    assert used in (1, cores)
    assert shares[0] == 0
    assert shares[-1] == len(lengths)
    assert all(np.diff(shares) > 0)
    if len(shares) > 2:
        costs = COST.of(np.array(lengths, np.int64))
        parts = [costs[first:end].sum() for first, end in itertools.pairwise(shares)]
        assert max(parts) <= 1.1501 * costs.sum() / cores


@pytest.mark.parametrize(
    ("lengths", "cores", "expected"),
    [
        ([16], 2, (1, [0, 1])),
        ([512], 2, (2, [0, 1])),
        ([512], 1, (1, [0, 1])),
        ([128, 128], 2, (2, [0, 1, 2])),
        ([128] * 3, 2, (2, [0, 3])),
        ([512, 16], 2, (2, [0, 2])),
        ([16] * 32, 2, (2, [0, 4, 8, 12, 16, 20, 24, 28, 32])),
        ([16] * 3, 2, (2, [0, 3])),
        ([16] * 4, 2, (2, [0, 2, 4])),
    ],
)
def test_small_even_and_uneven_passes(lengths: list[int], cores: int, expected: tuple[int, list[int]]) -> None:
    """One core for a small pass, shares for even texts, and all cores together for one long text."""
    assert dealt(lengths, cores) == expected
