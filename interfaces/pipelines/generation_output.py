"""The output of a pipeline as content parts: texts, images and video, each with its `type`.

Knows how pixels become PNG. Does not know HTTP, nor where media are kept.
"""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from interfaces.base.request_id import RequestID
from interfaces.base.status import GenerationStatus

Detail = Literal["low", "high", "auto"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)


class OutputTextContent(_Part):
    """A text."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[dict[str, Any]] = Field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = None


class RefusalContent(_Part):
    """The reason why the model will not answer."""

    type: Literal["refusal"] = "refusal"
    refusal: str


class ReasoningSummaryContent(_Part):
    """A summary of the model's reasoning."""

    type: Literal["reasoning_summary"] = "reasoning_summary"
    summary: str


class OutputImageContent(_Part):
    """An image: its address, or its bytes in base64."""

    type: Literal["output_image"] = "output_image"
    image_url: str | None = None
    image_data: str | None = None
    format: str | None = None
    detail: Detail | None = None

    @classmethod
    def from_numpy(cls, array: NDArray[np.uint8], format: str = "png", detail: Detail | None = None) -> Self:
        """Encode uint8 pixels `(height, width)` or `(height, width, 1, 3 or 4)`."""
        if format != "png":
            raise ValueError(f"format must be 'png', the only one written here, got {format!r}")
        return cls(image_data=base64.b64encode(_png(array)).decode(), format=format, detail=detail)


class OutputVideoContent(_Part):
    """A video: its address, its bytes in base64, or the raw frames that have yet to be encoded."""

    type: Literal["output_video"] = "output_video"
    video_url: str | None = None
    video_data: str | None = None
    format: str | None = None
    frames_per_second: float | None = None
    num_frames: int | None = None
    frames: NDArray[np.uint8] | None = None

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OutputVideoContent):
            return NotImplemented
        if self.model_dump(exclude={"frames"}) != other.model_dump(exclude={"frames"}):
            return False
        if self.frames is None or other.frames is None:
            return self.frames is other.frames
        return np.array_equal(self.frames, other.frames)

    @classmethod
    def from_numpy_frames(cls, frames: NDArray[np.uint8], frames_per_second: float | None = None) -> Self:
        """Wrap uint8 frames `(frames, height, width, channels)`, kept as they are."""
        if frames.dtype != np.uint8 or frames.ndim != 4:
            raise ValueError(
                f"frames must be uint8 (frames, height, width, channels), got {frames.dtype} {frames.shape}"
            )
        return cls(frames=frames, num_frames=len(frames), frames_per_second=frames_per_second)


class OutputAudioContent(_Part):
    """A sound: its address, or its bytes in base64."""

    type: Literal["output_audio"] = "output_audio"
    audio_url: str | None = None
    audio_data: str | None = None
    format: str | None = None
    sample_rate: int | None = None
    num_samples: int | None = None


OutputContent = Annotated[
    OutputTextContent
    | RefusalContent
    | ReasoningSummaryContent
    | OutputImageContent
    | OutputVideoContent
    | OutputAudioContent,
    Field(discriminator="type"),
]


class TokenDetails(BaseModel):
    """Counts of tokens by kind."""

    cached: int = 0
    text: int = 0
    audio: int = 0
    image: int = 0
    reasoning: int = 0


class Usage(BaseModel):
    """Tokens that a request cost."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: TokenDetails = Field(default_factory=TokenDetails)
    output_tokens_details: TokenDetails = Field(default_factory=TokenDetails)


class GenerationOutput(BaseModel):
    """All outputs of one request."""

    model_config = ConfigDict(frozen=True)

    request_id: RequestID
    final_status: GenerationStatus
    output: list[OutputContent]
    usage: Usage | None = None

    @property
    def is_done(self) -> bool:
        return self.final_status.is_done


_COLOR_OF_CHANNELS = {1: 0, 3: 2, 4: 6}


def _png(array: NDArray[np.uint8]) -> bytes:
    pixels = array[..., np.newaxis] if array.ndim == 2 else array
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in _COLOR_OF_CHANNELS or not pixels.size:
        raise ValueError(f"an image must be uint8 (height, width[, 1, 3 or 4]), got {array.dtype} {array.shape}")
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_OF_CHANNELS[channels], 0, 0, 0)
    # Every line begins with the number of its filter: 0, none.
    lines = np.zeros((height, 1 + width * channels), np.uint8)
    lines[:, 1:] = pixels.reshape(height, -1)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(lines.tobytes())) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
