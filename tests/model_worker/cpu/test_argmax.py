"""The largest sum of each row, kept tile by tile, is numpy's argmax over the whole row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from model_worker.cpu.gemm.weight_format import PANEL
from model_worker.cpu.simd.argmax import ArgmaxBuffers, reduce_argmax, take_argmax

WEIRD = [np.nan, -np.nan, np.inf, -np.inf, 0.0, 1.0, -1.0, 3e38, -3e38]


def expected(sums: NDArray[np.float32]) -> list[int]:
    """argmax knows the first among equals, and takes the first NaN."""
    return list(np.where(np.isfinite(sums.max(1)), sums.argmax(1), -1))


def kept(sums: NDArray[np.float32], cores: int, rng: np.random.Generator) -> list[int]:
    """Each core takes tiles in any order, as `argmax_product` does."""
    largest = ArgmaxBuffers(cores, len(sums))
    for at in PANEL * rng.permutation(-(-sums.shape[1] // PANEL)):
        core, lanes = int(rng.integers(cores)), min(PANEL, sums.shape[1] - at)
        tile = np.full((len(sums), PANEL), np.float32(1e30))  # what lies beyond the lanes must not count
        tile[:, :lanes] = sums[:, at : at + lanes]
        take_argmax(tile, tile.view(np.int32), len(sums), lanes, at, largest.keys[core], largest.places[core], 0)
    reduce_argmax(largest.keys, largest.places, largest.tokens)
    return list(largest.tokens)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 300), st.integers(1, 3), st.booleans())
def test_it_is_the_argmax(seed: int, rows: int, width: int, cores: int, few_values: bool) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(1, 4, (rows, width)) if few_values else rng.standard_normal((rows, width)) * 100
    sums = np.asarray(values, np.float32)
    assert kept(sums, cores, rng) == expected(sums)


@given(st.integers(0, 2**32 - 1), st.integers(1, 200), st.lists(st.sampled_from(WEIRD), min_size=1, max_size=4))
def test_a_row_whose_largest_is_not_finite_has_none(seed: int, width: int, weird: list[float]) -> None:
    rng = np.random.default_rng(seed)
    sums = rng.standard_normal((2, width)).astype(np.float32)
    sums[0, rng.integers(0, width, len(weird))] = weird
    assert kept(sums, 2, rng) == expected(sums)
