"""The counter-based generator: equal bits in both forms, uniform, independent along seed, position and token."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from model_worker.sampling import rng

EDGE_SEEDS = [0, 1, 2, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
U64 = 2**64


def _mix_exact(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % U64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % U64
    return value ^ (value >> 31)


def _uniform_exact(seed: int, position: int, token: int) -> float:
    """The definition, in Python's unbounded integers."""
    key = _mix_exact(_mix_exact((seed + 0xD1B54A32D192ED03) % U64) ^ (position * 0x8CB92BA72F3D8DD7 % U64))
    bits = _mix_exact((key + (token + 1) * 0x9E3779B97F4A7C15) % U64) >> 12
    return (2 * bits + 1) / 2**53


def _draw(seeds: list[int], positions: list[int], tokens: list[int]) -> NDArray[np.float64]:
    keys = rng.row_keys(np.array(seeds, np.uint64), np.array(positions, np.int64))
    return np.asarray(rng.uniforms_cpu(keys, np.array(tokens, np.int64)))


def _grid(seed: int, positions: int, tokens: int) -> NDArray[np.float64]:
    keys = np.repeat(rng.row_keys(np.full(positions, seed, np.uint64), np.arange(positions)), tokens)
    return np.asarray(rng.uniforms_cpu(keys, np.tile(np.arange(tokens), positions))).reshape(positions, tokens)


@settings(deadline=None)
@given(st.integers(0, U64 - 1), st.integers(0, 2**40), st.integers(0, 2**31 - 1))
def test_numba_and_torch_equal_the_definition_in_exact_integers(seed: int, position: int, token: int) -> None:
    exact = _uniform_exact(seed, position, token)
    keys = rng.row_keys(np.array([seed], np.uint64), np.array([position]))
    by_torch = rng.uniforms(torch.from_numpy(keys.view(np.int64)), torch.tensor([token]))
    assert _draw([seed], [position], [token]).tolist() == [exact] == by_torch.tolist()
    assert 0.0 < exact < 1.0


def test_torch_broadcasts_to_the_same_bits() -> None:
    keys = rng.row_keys(np.array(EDGE_SEEDS, np.uint64), np.arange(len(EDGE_SEEDS)) * 977)
    table = rng.uniforms(torch.from_numpy(keys.view(np.int64))[:, None], torch.arange(5000)[None, :])
    flat = rng.uniforms_cpu(np.repeat(keys, 5000), np.tile(np.arange(5000), len(keys)))
    assert np.array_equal(table.numpy().ravel(), flat)


def test_gumbel_noise_is_finite_at_the_ends_of_the_uniform() -> None:
    ends = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    assert torch.isfinite(-torch.log(-torch.log(ends))).all()
    noise = rng.gumbels(torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64)).numpy()
    assert scipy.stats.kstest(noise, "gumbel_r").pvalue > 1e-4


@pytest.mark.parametrize("seed", EDGE_SEEDS)
def test_uniform_along_tokens_and_along_positions(seed: int) -> None:
    for values in (_grid(seed, 1, 50_000), _grid(seed, 50_000, 1)):
        assert scipy.stats.kstest(values.ravel(), "uniform").pvalue > 1e-4


def test_uniform_along_consecutive_seeds() -> None:
    values = _draw(list(range(50_000)), [7] * 50_000, [11] * 50_000)
    assert scipy.stats.kstest(values, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("seed", EDGE_SEEDS)
def test_neighbouring_tokens_positions_and_seeds_are_independent(seed: int) -> None:
    """Chi-square on the 16 x 16 table of pairs of neighbours: correlation of any kind at that scale would show."""
    here = _grid(seed, 200, 250)
    pairs = {
        "token": (here[:, :-1], here[:, 1:]),
        "position": (here[:-1], here[1:]),
        "seed": (here, _grid((seed + 1) % U64, 200, 250)),
        "diagonal": (here[:-1, 1:], here[1:, :-1]),
    }
    for left, right in pairs.values():
        table = np.histogram2d(left.ravel(), right.ravel(), bins=16, range=[[0, 1], [0, 1]])[0].ravel()
        assert scipy.stats.chisquare(table).pvalue > 1e-5


def test_no_two_of_a_million_draws_collide() -> None:
    assert len(np.unique(_grid(3, 1000, 1000))) > 1_000_000 - 3
