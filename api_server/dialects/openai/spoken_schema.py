"""What OpenAI's bodies and answers say of voices, and of answers that are spoken. Types only."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

# Characters of the words of a clip.
MOST_REF_TEXT = 4096


class VoiceId(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    id: str = Field(description="The voice's name")


class AudioWish(BaseModel):
    """How an answer is spoken."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    voice: str | VoiceId | None = Field(None, description="A voice of the model that speaks; default: the first")
    format: Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"] = Field(
        "wav", description="The form of the sound; a stream takes pcm16 only: 24000 samples a second, 16 bits"
    )
    model: str | None = Field(None, description="The model that speaks; default: the first of this server")
    ref_audio: str | None = Field(
        None,
        description="A clip of the voice to imitate, as /v1/audio/speech takes it (--voice-clips)",
    )
    ref_text: str | None = Field(
        None, max_length=MOST_REF_TEXT, description="The words of ref_audio, which must go with it"
    )

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice


class AnswerAudio(BaseModel):
    """A spoken answer."""

    id: str = Field(description="Its name, which a later message of the assistant can have in place of content")
    data: str = Field(description="The file, as base64")
    transcript: str
    expires_at: int


class AudioDelta(BaseModel):
    """A piece of a spoken answer: of its text, or of its samples as base64. The last one has its name."""

    id: str | None = None
    data: str | None = None
    transcript: str | None = None
    expires_at: int | None = None
