"""Speech requests, metadata and the three forms of a chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interfaces import (
    AudioGenerationMetadata,
    AudioGenerationOutput,
    AudioGenerationRequest,
    AudioGenerationResponse,
    AudioGeneratorOutput,
    GenerationStatus,
    Request,
    RequestID,
)

ACTIVE, LAST = GenerationStatus.ACTIVE, GenerationStatus.END_OF_SEQUENCE

values = {
    "sample_rate": st.integers(0, 48_000),
    "duration": st.floats(0, 10),
    "chunk_id": st.integers(0, 5),
    "timestamp": st.text(max_size=3),
    "final_chunk": st.booleans(),
    "model_name": st.text(max_size=3),
    "request_id": st.text(max_size=3),
    "tokens_generated": st.integers(0, 5),
    "processing_time": st.floats(0, 10),
    "echo": st.text(max_size=3),
}


@given(st.fixed_dictionaries({}, optional={name: st.none() | of for name, of in values.items()}))
def test_metadata_drop_only_what_is_unknown(given_: dict[str, Any]) -> None:
    metadata = AudioGenerationMetadata(**given_)
    known = {name: value for name, value in given_.items() if value is not None}
    assert metadata.to_dict() == known
    assert metadata == known
    assert metadata == AudioGenerationMetadata(**known)
    assert (metadata == AudioGenerationMetadata()) is (not known)
    assert metadata != 5


def test_metadata_are_given_by_name_only() -> None:
    positional: Any = AudioGenerationMetadata
    with pytest.raises(TypeError):
        positional(24_000)


def test_a_request_needs_a_text_or_a_prompt() -> None:
    with pytest.raises(RuntimeError, match="either input or prompt"):
        AudioGenerationRequest(RequestID("a"), "m")
    assert AudioGenerationRequest(RequestID("a"), "m", prompt=[1]).input is None
    spoken = AudioGenerationRequest(RequestID("a"), "m", "hello", index=2, lora="voice")
    assert (spoken.index, spoken.lora, spoken.streaming) == (2, "voice", True)
    assert isinstance(spoken, Request)
    assert str(spoken) == "a"


def test_requests_with_arrays_compare_by_value() -> None:
    def made(tokens: list[int]) -> AudioGenerationRequest:
        first = AudioGenerationRequest(RequestID("a"), "m", "x", buffer_speech_tokens=np.array(tokens))
        return AudioGenerationRequest(**(vars(first) | {"sampling_params": None}))

    assert made([1, 2]) == made([1, 2])
    assert made([1, 2]) != made([1, 3])


def test_a_response_with_and_without_audio() -> None:
    empty = AudioGenerationResponse(ACTIVE)
    assert (empty.is_done, empty.has_audio_data) == (False, False)
    with pytest.raises(AssertionError, match="no audio"):
        _ = empty.audio_data
    full = AudioGenerationResponse(LAST, np.ones(3, np.float32))
    assert (full.is_done, full.has_audio_data, full.audio_data.tolist()) == (True, True, [1, 1, 1])


def test_outputs_have_defaults_of_their_own() -> None:
    one, other = AudioGenerationOutput(ACTIVE, 4), AudioGenerationOutput(ACTIVE, 4)
    assert one == other
    assert (one.audio_data.size, one.audio_data.dtype.name, one.is_done) == (0, "float32", False)
    one.metadata.chunk_id = 1
    assert other.metadata.to_dict() == {}
    crossing = AudioGeneratorOutput(np.zeros(2, np.float32), AudioGenerationMetadata(final_chunk=True), True)
    assert crossing.is_done
    assert crossing.buffer_speech_tokens is None
