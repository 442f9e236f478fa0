"""Speech: requests and outputs. Samples are float32 unless a decoder says otherwise."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from interfaces.base.request_id import Request, RequestID
from interfaces.base.status import GenerationStatus
from interfaces.request.sampling import SamplingParams
from interfaces.wire.equality import EqualByValue


@dataclass(frozen=True, eq=False)
class AudioGenerationRequest(EqualByValue, Request):
    """A text to be spoken. RuntimeError when there is neither `input` nor `prompt`."""

    model: str
    # The text, at most 4096 characters.
    input: str | None = None
    # Speech tokens of the voice to speak with.
    audio_prompt_tokens: list[int] = field(default_factory=list)
    # The text of those speech tokens.
    audio_prompt_transcription: str = ""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    _assistant_message_override: str | None = None
    # A prompt that goes to the model unchanged, instead of one made of the fields above.
    prompt: list[int] | str | None = None
    streaming: bool = True
    # The last speech tokens of a request that this one continues.
    buffer_speech_tokens: NDArray[Any] | None = None
    _: KW_ONLY
    # Place in a batch; carried, not used.
    index: int | None = None
    # Name of the adapter; None: `model` names it.
    lora: str | None = None

    def __post_init__(self) -> None:
        if self.prompt is None and self.input is None:
            raise RuntimeError("either input or prompt must be given")
        object.__setattr__(self, "request_id", RequestID(self.request_id))


@dataclass(kw_only=True, eq=False)
class AudioGenerationMetadata:
    """Facts about generated audio; None means unknown. Equal to another, or to a dict with the same `to_dict`."""

    __tagged__: ClassVar[bool] = True
    __hash__ = None  # type: ignore[assignment]

    sample_rate: int | None = None
    # Duration in seconds.
    duration: float | None = None
    chunk_id: int | None = None
    timestamp: str | None = None
    final_chunk: bool | None = None
    model_name: str | None = None
    request_id: str | None = None
    tokens_generated: int | None = None
    # Processing time in seconds.
    processing_time: float | None = None
    echo: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the known fields: only None is left out, so that 0, False and "" stay."""
        pairs = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: value for name, value in pairs if value is not None}

    def __eq__(self, other: object) -> bool:
        if isinstance(other, AudioGenerationMetadata):
            return self.to_dict() == other.to_dict()
        return self.to_dict() == other if isinstance(other, dict) else NotImplemented


@dataclass(eq=False)
class AudioGenerationResponse(EqualByValue):
    """One chunk, as an `AudioGenerator` answers."""

    __tagged__: ClassVar[bool] = True

    final_status: GenerationStatus
    audio: NDArray[Any] | None = None
    buffer_speech_tokens: NDArray[Any] | None = None

    @property
    def is_done(self) -> bool:
        return self.final_status.is_done

    @property
    def has_audio_data(self) -> bool:
        return self.audio is not None

    @property
    def audio_data(self) -> NDArray[Any]:
        """The samples. AssertionError when there are none."""
        if self.audio is None:
            raise AssertionError("there is no audio in this response: check has_audio_data first")
        return self.audio


@dataclass(eq=False)
class AudioGeneratorOutput(EqualByValue):
    """One chunk with its metadata, as it crosses processes."""

    __tagged__: ClassVar[bool] = True

    audio_data: NDArray[Any]
    metadata: AudioGenerationMetadata
    is_done: bool
    buffer_speech_tokens: NDArray[Any] | None = None


@dataclass(eq=False)
class AudioGenerationOutput(EqualByValue):
    """One chunk, as a `Pipeline` answers. `steps_executed` counts the speech tokens it took."""

    final_status: GenerationStatus
    steps_executed: int
    audio_data: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    buffer_speech_tokens: NDArray[Any] | None = None
    metadata: AudioGenerationMetadata = field(default_factory=AudioGenerationMetadata)

    @property
    def is_done(self) -> bool:
        return self.final_status.is_done
