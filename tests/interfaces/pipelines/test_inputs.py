"""Batches of contexts in both forms, and what is derived from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from interfaces import (
    AudioGenerationInputs,
    BatchType,
    EmbeddingsGenerationInputs,
    PipelineInputs,
    PixelGenerationInputs,
    RequestID,
    TextContext,
    TextGenerationInputs,
    TokenBuffer,
)


def context(name: str, length: int = 3, generated: int = 0, **more: Any) -> TextContext:
    made = TextContext(tokens=TokenBuffer(np.arange(length)), max_length=99, request_id=RequestID(name), **more)
    for token in range(generated):
        made.update(token)
    return made


def test_a_map_and_lists_of_replicas_are_the_same_batch() -> None:
    a, b, c = context("a"), context("b"), context("c")
    replicas = TextGenerationInputs([[a, b], [], [c]], 4)
    one = TextGenerationInputs({"a": a, "b": b, "c": c}, 4)
    by_name = TextGenerationInputs(batch={"a": a, "b": b, "c": c}, num_steps=4)
    for inputs in (replicas, one, by_name):
        assert inputs.batch == {"a": a, "b": b, "c": c}
        assert [each.request_id for each in inputs.flat_batch] == ["a", "b", "c"]
        assert (inputs.num_steps, inputs.batch_size, bool(inputs)) == (4, 3, True)
        assert isinstance(inputs, PipelineInputs)
    assert [len(replica) for replica in replicas.batches] == [2, 0, 1]
    assert [len(replica) for replica in one.batches] == [3]


def test_an_empty_batch_is_false() -> None:
    assert not TextGenerationInputs([], 1)
    assert not TextGenerationInputs([[], []], 1)
    assert not TextGenerationInputs({}, 1)


def test_what_is_derived() -> None:
    fresh, running = context("a", 5), context("b", 3, generated=2)
    assert TextGenerationInputs([[fresh, running]]).batch_type is BatchType.CE
    inputs = TextGenerationInputs([[running]])
    assert (inputs.input_tokens, inputs.context_tokens, inputs.batch_type) == (1, 4, BatchType.TG)
    both = TextGenerationInputs([[fresh], [running]])
    assert (both.input_tokens, both.context_tokens) == (6, 4)


def test_log_probabilities_of_the_batch() -> None:
    quiet, loud = context("a"), context("b", log_probabilities=3, log_probabilities_echo=True)
    inputs = TextGenerationInputs([[quiet, loud]])
    assert (inputs.batch_top_log_probs, inputs.batch_echo) == ([0, 3], [False, True])
    assert (inputs.enable_log_probs, inputs.enable_echo) == (True, True)
    assert not TextGenerationInputs([[quiet]]).enable_log_probs
    assert not TextGenerationInputs([[quiet]]).enable_echo


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="exactly one of batches and batch"):
        TextGenerationInputs()
    with pytest.raises(ValueError, match="exactly one of batches and batch"):
        TextGenerationInputs([[context("a")]], batch={"a": context("a")})
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        TextGenerationInputs([[context("a")]], 0)
    with pytest.raises(ValueError, match="request_id 'a' is in the batch twice"):
        TextGenerationInputs([[context("a")], [context("a")]])


def test_the_other_tasks() -> None:
    a, b = context("a"), context("b")
    embeddings = EmbeddingsGenerationInputs([{a.request_id: a}, {b.request_id: b}])
    assert embeddings.batch == {"a": a, "b": b}
    assert AudioGenerationInputs({a.request_id: a}).batch == {"a": a}
    assert PixelGenerationInputs({a.request_id: a}).batch == {"a": a}
