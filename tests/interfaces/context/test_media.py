"""Contexts for speech and images: they are what their protocols say, and refuse what cannot be drawn."""

from __future__ import annotations

import numpy as np
import pytest

from interfaces.base.status import GenerationStatus
from interfaces.context.media import PixelContext, SpeechContext
from interfaces.context.protocols import AudioGenerationContext, BaseContext, PixelGenerationContext
from interfaces.context.tokens import TokenBuffer
from interfaces.request.sampling import SamplingParams


def pixels(**fields: object) -> PixelContext:
    return PixelContext(tokens=TokenBuffer(np.array([1, 2])), **fields)  # type: ignore[arg-type]


def test_they_satisfy_their_protocols() -> None:
    speech = SpeechContext.from_prompt([1, 2], SamplingParams(max_new_tokens=3), streaming=False)
    assert isinstance(speech, AudioGenerationContext)
    assert isinstance(pixels(), PixelGenerationContext)
    assert isinstance(pixels(), BaseContext)
    assert (speech.max_length, speech.streaming) == (5, False)


def test_speech_tokens_end_like_text() -> None:
    speech = SpeechContext.from_prompt([1, 2], SamplingParams(max_new_tokens=3, stop_token_ids=[7]))
    speech.update(5)
    speech.update(7)
    assert speech.status is GenerationStatus.END_OF_SEQUENCE
    assert speech.to_generation_output().tokens == [5, 7]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("height", 0),
        ("width", -16),
        ("num_inference_steps", 0),
        ("num_images_per_prompt", 0),
        ("guidance_scale", -1.0),
        ("guidance_scale", float("nan")),
    ],
)
def test_what_cannot_be_drawn_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be"):
        pixels(**{field: value})


def test_a_status_ends_it() -> None:
    context = pixels()
    assert not context.is_done
    context.status = GenerationStatus.CANCELLED
    assert context.is_done
