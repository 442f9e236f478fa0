"""Samples at another rate: the same sound, also when they come in pieces."""

from __future__ import annotations

import numpy as np
import pytest

from api_server.speech.resampling import Resampler

RATES = [(22050, 24000), (16000, 24000), (44100, 24000), (16000, 8000), (24000, 48000), (16000, 16000)]


@pytest.mark.parametrize(("source", "target"), RATES)
def test_a_tone_stays_what_it_is(source: int, target: int) -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(source) / source).astype(np.float32)
    resampler = Resampler(source, target)
    found = np.concatenate([resampler.push(tone), resampler.end()])
    assert len(found) == target
    expected = np.sin(2 * np.pi * 440 * np.arange(target) / target)
    # Near the ends there is silence on one side.
    np.testing.assert_allclose(found[300:-300], expected[300:-300], atol=1e-3)


def test_what_the_lower_rate_cannot_hold_is_taken_out() -> None:
    tone = np.sin(2 * np.pi * 6000 * np.arange(16000) / 16000).astype(np.float32)
    resampler = Resampler(16000, 8000)
    found = np.concatenate([resampler.push(tone), resampler.end()])
    assert np.abs(found[300:-300]).max() < 0.01


@pytest.mark.parametrize(("source", "target"), RATES)
def test_pieces_give_what_the_whole_gives(source: int, target: int) -> None:
    rng = np.random.default_rng()
    samples = rng.normal(size=int(rng.integers(1, 3000))).astype(np.float32)
    whole = Resampler(source, target)
    expected = np.concatenate([whole.push(samples), whole.end()])
    cuts = np.sort(rng.integers(0, len(samples) + 1, 6))
    pieces = Resampler(source, target)
    found = [pieces.push(piece) for piece in np.split(samples, cuts)]
    np.testing.assert_array_equal(np.concatenate([*found, pieces.end()]), expected)
    assert len(expected) == -(-len(samples) * target // source)
