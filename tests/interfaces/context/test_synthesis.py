"""Contexts of sentences to speak keep each seed with its sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from interfaces import Batch, PoolingContext, PoolingTask, Submit, SynthesisContext, decode, encode


def context(**options: Any) -> SynthesisContext:
    given = {"seeds": np.array([7, 2**62, 9]), "voice": 2, "speed": 0.5} | options
    return SynthesisContext.of([[1, 2], [3], [4, 5, 6]], PoolingTask.SPEAK, **given)


def test_seeds_go_with_their_sentences() -> None:
    whole = context()
    assert whole.part(1, 3).seeds.tolist() == [2**62, 9]
    assert whole.select(np.array([0, 2])).seeds.tolist() == [7, 9]
    joined = SynthesisContext.joined([whole, whole.part(0, 1)])
    assert joined.seeds.tolist() == [7, 2**62, 9, 7]
    assert joined.lengths.tolist() == [2, 1, 3, 2]


def test_it_travels_as_itself() -> None:
    whole = context()
    received = decode(encode(Submit(1, whole))).context
    assert type(received) is SynthesisContext
    assert received == whole
    other = PoolingContext.of([[1]], PoolingTask.EMBED)
    parts = decode(encode(Batch(1, 2, 3, [whole, other]))).parts
    assert [type(part) for part in parts] == [SynthesisContext, PoolingContext]


def test_sentences_with_other_options_are_not_computed_together() -> None:
    options = [context().options, context(voice=1).options, context(speed=1.0).options]
    assert len(set(options)) == 3
    assert context(seeds=np.array([1, 2, 3])).options == options[0]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"seeds": np.array([1, 2])}, "seeds must have one int64"),
        ({"seeds": np.array([1, 2, -3])}, "seeds must be at least 0, got -3"),
        ({"seeds": np.array([1, 2, 3], np.int32)}, "seeds must have one int64"),
        ({"voice": -1}, "voice must be at least 0"),
        ({"speed": 0.0}, "speed must be above 0"),
        ({"speed": float("inf")}, "speed must be above 0"),
    ],
)
def test_values_that_contradict_each_other_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        context(**wrong)
