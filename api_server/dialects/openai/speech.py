"""POST /v1/audio/speech: OpenAI's fields, and `seed` and `sample_rate`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from starlette.responses import Response
from starlette.routing import Route

from api_server.body import unknown_fields
from api_server.body.unknown_fields import Refusals, unless
from api_server.body.validation import Mismatch, parse
from api_server.dialects.openai.errors import error_frame, render_error
from api_server.dialects.openai.schema import LONGEST_NAME, Body, ErrorAnswer
from api_server.dialects.openai.spoken_schema import VoiceId
from api_server.errors import invalid
from api_server.speech.encoding import MEDIA_TYPES, Encoder, Format, Rate, check_installed, rate_of
from api_server.speech.generated import GeneratedSpeech
from api_server.speech.reading import MOST_SEED
from api_server.speech.speaking import Speech, check, speak
from api_server.speech.wish import Wish
from api_server.web.byte_stream import ByteStream
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.sse import EventStream, frame

# Characters of a text, as OpenAI has it.
MOST_CHARACTERS = 4096


class SpeechBody(Body):
    model: str | None = Field(None, description="The served model's name, or nothing")
    input: str = Field(min_length=1, max_length=MOST_CHARACTERS, description="The text to speak")
    voice: str | VoiceId | None = Field(
        None, description="A voice of the model, as /v1/models lists them; default: the first"
    )
    instructions: str | None = Field(
        None, max_length=MOST_CHARACTERS, description="How to speak; refused by models that take no instructions"
    )
    response_format: Format = Field("mp3", description="The form of the sound; pcm: 16 bits, little-endian, mono")
    speed: float = Field(1.0, ge=0.25, le=4.0, description="Times as fast as the model speaks by itself")
    stream_format: Literal["audio", "sse"] = Field(
        "audio", description="audio: the bytes of the file as they come; sse: events with base64, and usage"
    )
    seed: int | None = Field(None, ge=0, le=MOST_SEED, description="The same seed gives the same samples")
    sample_rate: Rate | None = Field(
        None, description="Samples a second; default: 24000 for pcm, else the model's own where the format has it"
    )
    ref_audio: str | None = Field(
        None,
        description="A clip of the voice to imitate: a data URI, base64, or a URL (--fetch-hosts); for models that "
        "generate speech tokens, where the operator allows it (--voice-clips)",
    )
    ref_text: str | None = Field(
        None, max_length=MOST_CHARACTERS, description="The words of ref_audio, which must go with it"
    )
    user: str | None = Field(None, max_length=LONGEST_NAME, description="Accepted, without effect")

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice


class SpeechUsage(BaseModel):
    # Of the text, and of speech tokens, which models that speak in one pass do not have.
    input_tokens: int
    output_tokens: int
    total_tokens: int
    # Length of the sound.
    seconds: float


class SpeechEvent(BaseModel):
    """One event: a delta has `audio`, base64 of the next bytes of the file, and the last event has `usage`."""

    type: Literal["speech.audio.delta", "speech.audio.done"]
    audio: str | None = None
    usage: SpeechUsage | None = None


# Fields of other servers that this one does not implement.
_REFUSED: Refusals = {
    "language": ("a choice of the language, which the model decides", unless(None, "", "auto", "Auto")),
}

_DOCUMENT = Document(
    "Speak a text",
    "openai",
    body=SpeechBody,
    frame=SpeechEvent,
    example={"input": "Good morning. The next train leaves at nine.", "response_format": "wav"},
    errors=dict.fromkeys((400, 404, 413, 415, 429, 500, 503), ErrorAnswer),
    pools=True,
    checks_task=True,
    speaks=True,
    media_types=tuple(dict.fromkeys(MEDIA_TYPES.values())),
)


def route() -> Route:
    return endpoint("/v1/audio/speech", speech, render_error, document=_DOCUMENT)


async def speech(call: Call) -> Response:
    body = await call.apart(lambda: _read(call))
    kind = body.response_format
    rate = rate_of(kind, check(call.server).sample_rate, body.sample_rate)
    check_installed(kind)
    wish = Wish(
        input=body.input,
        voice=body.voice_name,
        instructions=body.instructions or "",
        speed=body.speed,
        seed=body.seed,
        ref_audio=body.ref_audio or "",
        ref_text=body.ref_text or "",
    )
    spoken = await speak(call, wish)
    try:
        # The first samples are awaited, so that an error before them has a status of its own.
        pieces = spoken.pieces()
        first = await anext(pieces)
        encoder = await asyncio.to_thread(Encoder, kind, spoken.sample_rate, rate)
        parts = _parts(first, pieces, encoder)
        headers = {"x-sample-rate": str(rate), "x-seed": str(spoken.seed)}
        if body.stream_format == "sse":
            stream = EventStream(_events(parts, spoken), spoken.close, error_frame)
            stream.headers.update(headers)
            return stream
        if not spoken.in_one_piece:
            return ByteStream(parts, spoken.close, MEDIA_TYPES[kind], headers)
        return await _whole(first, pieces, encoder, MEDIA_TYPES[kind], headers)
    except BaseException:
        spoken.close()
        raise


def _read(call: Call) -> SpeechBody:
    unknown_fields.check(call.json, SpeechBody, _REFUSED)
    try:
        body = parse(SpeechBody, call.json)
    except Mismatch as mismatch:
        raise invalid(str(mismatch), mismatch.field or None) from None
    call.server.check_model(body.model or "")
    return body


async def _whole(
    samples: NDArray[np.float32],
    pieces: AsyncIterator[NDArray[np.float32]],
    encoder: Encoder,
    media_type: str,
    headers: Mapping[str, str],
) -> Response:
    """The file of the only sentence, whose header has its length."""
    await anext(pieces, None)  # ends the request
    return Response(await asyncio.to_thread(encoder.whole, samples), 200, dict(headers), media_type)


async def _parts(
    first: NDArray[np.float32], pieces: AsyncIterator[NDArray[np.float32]], encoder: Encoder
) -> AsyncIterator[bytes]:
    """The bytes of the file, sentence by sentence."""
    yield await asyncio.to_thread(encoder.part, first)
    async for samples in pieces:
        yield await asyncio.to_thread(encoder.part, samples)
    yield await asyncio.to_thread(encoder.rest)


async def _events(parts: AsyncIterator[bytes], spoken: Speech | GeneratedSpeech) -> AsyncIterator[bytes]:
    async for part in parts:
        if part:
            yield frame({"type": "speech.audio.delta", "audio": base64.b64encode(part).decode()})
    usage = {
        "input_tokens": spoken.tokens,
        "output_tokens": spoken.output_tokens,
        "total_tokens": spoken.tokens + spoken.output_tokens,
        "seconds": round(spoken.seconds, 3),
    }
    yield frame({"type": "speech.audio.done", "usage": usage})
