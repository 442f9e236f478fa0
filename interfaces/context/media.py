"""Contexts of requests for speech and for images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from interfaces.base.request_id import RequestID
from interfaces.base.status import GenerationStatus
from interfaces.context.text import TextContext
from interfaces.context.tokens import TokenBuffer
from interfaces.wire.codec import I64
from interfaces.wire.equality import EqualByValue


def _no_tokens() -> NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass(kw_only=True, eq=False)
class SpeechContext(TextContext):
    """An `AudioGenerationContext`: a text context whose generated tokens are speech.

    `decoded_length` counts the generated tokens that are audio already.
    """

    wire_tag: ClassVar[str] = "speech"

    audio_prompt_tokens: I64 = field(default_factory=_no_tokens)
    buffer_speech_tokens: I64 | None = None
    streaming: bool = True
    decoded_length: int = 0

    __hash__ = TextContext.__hash__


@dataclass(kw_only=True, eq=False)
class PixelContext(EqualByValue):
    """A `PixelGenerationContext`: the input of a diffusion model. `latents` begin as noise."""

    wire_tag: ClassVar[str] = "pixels"

    tokens: TokenBuffer
    request_id: RequestID = field(default_factory=RequestID)
    model_name: str = ""
    latents: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    height: int = 1024
    width: int = 1024
    num_inference_steps: int = 50
    guidance_scale: float = 3.5
    num_images_per_prompt: int = 1
    status: GenerationStatus = GenerationStatus.ACTIVE

    def __post_init__(self) -> None:
        for name in ("height", "width", "num_inference_steps", "num_images_per_prompt"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.guidance_scale < np.inf:
            raise ValueError(f"guidance_scale must be a finite number of at least 0, got {self.guidance_scale}")

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.request_id)

    @property
    def is_done(self) -> bool:
        return self.status.is_done
