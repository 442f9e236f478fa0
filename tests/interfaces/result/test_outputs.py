"""Outputs of one request as one, and the envelope in which they travel."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interfaces import (
    EmbeddingsGenerationOutput,
    ErrorCode,
    GenerationStatus,
    LogProbabilities,
    PipelineOutput,
    RequestError,
    RequestID,
    SchedulerResult,
    SchedulerStatus,
    TextGenerationOutput,
)

ACTIVE, END = GenerationStatus.ACTIVE, GenerationStatus.END_OF_SEQUENCE


def output(
    tokens: list[int], status: GenerationStatus = ACTIVE, logprobs: bool = False, cached: int | None = None
) -> TextGenerationOutput:
    entries = [LogProbabilities([-float(token)], [{token: -float(token)}]) for token in tokens] if logprobs else None
    return TextGenerationOutput(RequestID("r"), tokens, status, entries, cached)


@given(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=6), st.booleans())
def test_merged_outputs_say_what_the_parts_said(parts: list[list[int]], logprobs: bool) -> None:
    outputs = [output(part, logprobs=logprobs, cached=7 if i == 0 else None) for i, part in enumerate(parts)]
    outputs[-1].final_status = END
    merged = TextGenerationOutput.merge(outputs)
    everything = [token for part in parts for token in part]
    assert merged.tokens == everything
    assert (merged.final_status, merged.num_cached_tokens, merged.request_id) == (END, 7, "r")
    if logprobs:
        assert merged.log_probabilities == output(everything, logprobs=True).log_probabilities
    else:
        assert merged.log_probabilities is None
    assert [each.tokens for each in outputs] == parts


def test_merge_refuses_nothing_and_a_mixture() -> None:
    with pytest.raises(ValueError, match="at least one output"):
        TextGenerationOutput.merge([])
    with pytest.raises(ValueError, match="1 of 2 outputs have no log_probabilities"):
        TextGenerationOutput.merge([output([1], logprobs=True), output([2])])
    assert TextGenerationOutput.merge([output([1], logprobs=True), output([], END)]).log_probabilities is not None


def test_an_embedding_is_done_and_equal_by_value() -> None:
    vector = np.arange(4, dtype=np.float32)
    made = EmbeddingsGenerationOutput(vector)
    assert made.is_done
    assert made == EmbeddingsGenerationOutput(vector.copy())
    assert made != EmbeddingsGenerationOutput(vector.astype(np.float64))
    assert made != EmbeddingsGenerationOutput(vector + 1)
    assert EmbeddingsGenerationOutput(np.array([np.nan])) == EmbeddingsGenerationOutput(np.array([np.nan]))


def test_outputs_are_pipeline_outputs() -> None:
    assert isinstance(output([]), PipelineOutput)
    assert isinstance(EmbeddingsGenerationOutput(np.zeros(1)), PipelineOutput)
    assert not isinstance(object(), PipelineOutput)


def test_the_five_ways_to_make_a_scheduler_result() -> None:
    news, last = output([1]), output([2], END)
    error = RequestError(ErrorCode.FAILED, "why")
    made = {
        "active": SchedulerResult.active(news),
        "complete": SchedulerResult.complete(last),
        "cancelled": SchedulerResult[TextGenerationOutput].cancelled(),
        "created active": SchedulerResult.create(news),
        "created complete": SchedulerResult.create(last),
        "failed": SchedulerResult[TextGenerationOutput].failed(error),
    }
    assert {name: (result.status, result.is_done, result.result, result.error) for name, result in made.items()} == {
        "active": (SchedulerStatus.ACTIVE, False, news, None),
        "complete": (SchedulerStatus.COMPLETE, True, last, None),
        "cancelled": (SchedulerStatus.CANCELLED, True, None, None),
        "created active": (SchedulerStatus.ACTIVE, False, news, None),
        "created complete": (SchedulerStatus.COMPLETE, True, last, None),
        "failed": (SchedulerStatus.CANCELLED, True, None, error),
    }
    assert all(result.stop_stream is result.is_done for result in made.values())


def test_a_result_of_each_form_crosses_the_wire() -> None:
    from interfaces import msgpack_numpy_decoder, msgpack_numpy_encoder

    encode = msgpack_numpy_encoder()
    decode = msgpack_numpy_decoder(SchedulerResult[TextGenerationOutput])
    for result in (
        SchedulerResult.create(output([1, 2], END, logprobs=True, cached=3)),
        SchedulerResult[TextGenerationOutput].cancelled(),
        SchedulerResult[TextGenerationOutput].failed(RequestError(ErrorCode.TOO_LONG, "the prompt")),
    ):
        assert decode(encode(result)) == result
