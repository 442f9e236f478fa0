"""Counts of seen tokens against collections.Counter; the penalties themselves are tested through the sampler."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from model_worker.sampling.penalties import SeenTokens


@settings(deadline=None)
@given(st.lists(st.integers(-2, 45), max_size=60), st.lists(st.integers(0, 39), max_size=120))
def test_counts_equal_a_counter(before: list[int], after: list[int]) -> None:
    seen = SeenTokens(np.array(before, np.int32), 40)
    for token in after:
        seen.add(token)
    expected = Counter([token for token in before if 0 <= token < 40] + after)
    assert dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True)) == expected
