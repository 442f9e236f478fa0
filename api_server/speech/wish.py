"""What a client wants to hear."""

from __future__ import annotations

from dataclasses import dataclass

from shared.speech_tokens import Voice


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Fields are named as in OpenAI's body."""

    input: str
    voice: str | None = None
    instructions: str = ""
    speed: float = 1.0
    # Of the noise; None for a random one.
    seed: int | None = None
    # A clip of the voice to imitate (a data URI, base64 or a URL), and its words; empty without one.
    ref_audio: str = ""
    ref_text: str = ""
    # The voice of such a clip, where it has been made already.
    imitated: Voice | None = None
