"""POST /v1/audio/transcriptions and /v1/audio/translations: a sound file to text, in a multipart form."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import orjson
from pydantic import BaseModel, Field
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from api_server.answers.observer import receiving
from api_server.dialects.openai.errors import error_frame, render_error
from api_server.dialects.openai.first_event import begun
from api_server.dialects.openai.schema import ErrorAnswer
from api_server.engine import scheduling
from api_server.errors import invalid, unsupported
from api_server.transcription import captions
from api_server.transcription.listening import Listening
from api_server.transcription.prompts import language_code, language_name
from api_server.transcription.transcriber import Segment, Transcription, Wish
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.form import Form
from api_server.web.sse import EventStream, named_frame
from interfaces import RequestID

_FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
# Formats that have times.
_TIMED = ("srt", "verbose_json", "vtt")
_SWITCH = {"true": True, "1": True, "false": False, "0": False}
_HOTTEST = 1.0
# Fields of OpenAI's that have no meaning here.
_REFUSED = ("include", "keywords", "languages", "known_speaker_names", "known_speaker_references")


class TranslationForm(BaseModel):
    file: bytes = Field(description="The sound file: WAV, FLAC, MP3, OGG, M4A or WebM")
    model: str | None = Field(None, description="The name of the model")
    prompt: str | None = Field(None, description="Text before the transcript, for its names and its style")
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = Field("json")
    temperature: float = Field(0.0, ge=0, le=_HOTTEST, description="0: the most probable token at each place")


class TranscriptionForm(TranslationForm):
    language: str | None = Field(None, description="Its code, such as en; without it the model finds it out")
    stream: bool = Field(False, description="Send the text piece by piece, as events")
    timestamp_granularities: list[Literal["segment", "word"]] | None = Field(None, description="For verbose_json")


class Duration(BaseModel):
    type: Literal["duration"]
    seconds: float


class InputTokens(BaseModel):
    audio_tokens: int
    text_tokens: int


class Tokens(BaseModel):
    """What counts for a model that generates text."""

    type: Literal["tokens"]
    input_tokens: int
    input_token_details: InputTokens
    output_tokens: int
    total_tokens: int


class SegmentObject(BaseModel):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class WordObject(BaseModel):
    word: str
    start: float
    end: float


class TranscriptAnswer(BaseModel):
    text: str
    usage: Duration | Tokens
    task: str | None = None
    language: str | None = None
    duration: float | None = None
    segments: list[SegmentObject] | None = None
    words: list[WordObject] | None = None


class TranscriptEvent(BaseModel):
    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str | None = None
    text: str | None = None
    usage: Duration | Tokens | None = None


_ERRORS = dict.fromkeys((400, 404, 413, 415, 429, 500, 503), ErrorAnswer)
_TRANSCRIBE = Document(
    "Transcribe speech",
    "openai",
    body=TranscriptionForm,
    answer=TranscriptAnswer,
    frame=TranscriptEvent,
    errors=_ERRORS,
    hears=True,
)
_TRANSLATE = Document(
    "Translate speech to English text",
    "openai",
    body=TranslationForm,
    answer=TranscriptAnswer,
    errors=_ERRORS,
    hears=True,
)


def routes() -> list[Route]:
    return [
        endpoint("/v1/audio/transcriptions", transcriptions, render_error, document=_TRANSCRIBE),
        endpoint("/v1/audio/translations", translations, render_error, document=_TRANSLATE),
    ]


async def transcriptions(call: Call) -> Response:
    return await _answer(call, "transcribe")


async def translations(call: Call) -> Response:
    return await _answer(call, "translate")


async def _answer(call: Call, task: str) -> Response:
    with receiving(call.server.observers, call.path):
        form = _format(call)
        wish = _wish(call, task, form)
        streams = task == "transcribe" and _switch(call, "stream")
        _check_others(call, form)
        if streams and form not in ("json", "text"):
            raise invalid(f"response_format must be json or text with stream, got {form!r}", "response_format")
        data = call.fields.files.get("file")
        if data is None:
            raise invalid("file must be given, as a file of the form: send the bytes of a sound file", "file")
        check_names(call.fields, TranscriptionForm if task == "transcribe" else TranslationForm)
        if call.server.recogniser is None:
            prepared = await Listening.prepared(call.server, data, wish)
        else:
            async with scheduling.spending("reading its file"):
                clip = await call.server.media.clips.read(data, "file")
            transcription = Transcription(call.server, clip, wish)
    if call.server.recogniser is None:
        return await _heard(Listening(call.server, prepared), form, streams)
    if streams:
        transcription.begin()
        frames = await begun(_events(transcription), transcription.close)
        return EventStream(frames, transcription.close, error_frame)
    with call.server.media.clips.holding(transcription.attention_bytes):
        transcription.begin()
        await transcription.collect()
    return _WRITERS[form](transcription, task)


async def _heard(listening: Listening, form: str, streams: bool) -> Response:
    """The answer of a model that hears and generates text."""
    if streams:
        frames = await begun(_events(listening), listening.close)
        return EventStream(frames, listening.close, error_frame)
    await listening.collect()
    return _text(listening, "") if form == "text" else _json(listening, "")


async def _events(transcription: Transcription | Listening) -> AsyncIterator[bytes]:
    async for delta in transcription.deltas():
        yield named_frame({"type": "transcript.text.delta", "delta": delta})
    done = {"type": "transcript.text.done", "text": transcription.text, "usage": transcription.usage}
    yield named_frame(done)


def _wish(call: Call, task: str, form: str) -> Wish:
    files = call.server.recogniser
    given = call.fields.text("language") if task == "transcribe" else None
    if files is None:
        if task == "translate":
            raise unsupported(
                "model", f"translation by {call.server.model_name!r}, which can be asked for it in a chat,"
            )
        if form in _TIMED:
            raise unsupported("response_format", f"{form} by {call.server.model_name!r}, which gives no times,")
        code = language_code({}, given, "language") if given else None
    else:
        if task == "translate" and task not in files.tasks:
            raise unsupported("model", f"translation by {call.server.model_name!r}, which knows one language,")
        code = language_code(files.languages or {"en": 0}, given, "language") if given else None
    return Wish(
        RequestID(call.request_id),
        call.path,
        call.server.model_name,
        task,
        code,
        call.fields.text("prompt") or "",
        _temperature(call.fields.text("temperature")),
        timestamps=form in _TIMED,
        words="word" in call.fields.texts.get("timestamp_granularities", []),
        received=call.received,
    )


def _format(call: Call) -> str:
    given = call.fields.text("response_format") or "json"
    if given not in _FORMATS:
        raise invalid(f"response_format must be one of {', '.join(_FORMATS)}, got {given!r:.60}", "response_format")
    return given


def _temperature(given: str | None) -> float:
    if given is None or not given.strip():
        return 0.0
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _HOTTEST:
        raise invalid(f"temperature must be a number of 0 to {_HOTTEST:g}, got {given!r:.60}", "temperature")
    return value


def _switch(call: Call, name: str) -> bool:
    given = call.fields.text(name)
    found = False if given is None else _SWITCH.get(given.strip().lower())
    if found is None:
        raise invalid(f"{name} must be true or false, got {given!r:.60}", name)
    return found


def check_names(form: Form, model: type[TranslationForm]) -> None:
    """Refuses fields that the form does not have. Raises RequestFailed that names the first."""
    known = {*model.model_fields, *_REFUSED, "chunking_strategy"}
    for name in sorted(form.names - known):
        fields = ", ".join([*model.model_fields, *scheduling.FIELDS])
        raise invalid(f"{name:.60} is no field of this form: leave it out; its fields are {fields}", name[:60])


def _check_others(call: Call, form: str) -> None:
    """Refuses what this server does not do, by its field."""
    granularities = call.fields.texts.get("timestamp_granularities", [])
    for given in granularities:
        if given not in ("segment", "word"):
            message = f"timestamp_granularities must be segment or word, got {given!r:.60}"
            raise invalid(message, "timestamp_granularities")
    if granularities and form != "verbose_json":
        raise invalid(
            f"timestamp_granularities needs response_format verbose_json, got {form!r}", "timestamp_granularities"
        )
    for name in _REFUSED:
        if call.fields.texts.get(name):
            raise unsupported(name, "this field")
    chunking = call.fields.text("chunking_strategy")
    if chunking not in (None, "auto"):
        raise unsupported("chunking_strategy", f"{chunking!r:.60} instead of auto")


def _json(transcription: Transcription | Listening, _: str) -> Response:
    value = {"text": transcription.text, "usage": transcription.usage}
    return Response(orjson.dumps(value), media_type="application/json")


def _verbose(transcription: Transcription, task: str) -> Response:
    value = {
        "task": task,
        "language": "english" if task == "translate" else language_name(transcription.language or "en"),
        "duration": round(transcription.seconds, 3),
        "text": transcription.text,
        "segments": [_segment(number, segment) for number, segment in enumerate(transcription.segments)],
        "usage": transcription.usage,
    }
    if transcription.wants_words:
        words = [{"word": word.text, "start": word.start, "end": word.end} for word in transcription.words]
        value = value | {"words": words}
    return Response(orjson.dumps(value), media_type="application/json")


def _segment(number: int, segment: Segment) -> dict[str, Any]:
    return {
        "id": number,
        "seek": segment.seek,
        "start": round(segment.start, 2),
        "end": round(segment.end, 2),
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": segment.temperature,
        "avg_logprob": segment.mean_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech,
    }


def _text(transcription: Transcription | Listening, _: str) -> Response:
    return PlainTextResponse(f"{transcription.text}\n")


def _srt(transcription: Transcription, _: str) -> Response:
    return PlainTextResponse(captions.srt(transcription.segments), media_type="application/x-subrip")


def _vtt(transcription: Transcription, _: str) -> Response:
    return PlainTextResponse(captions.vtt(transcription.segments), media_type="text/vtt")


_WRITERS: dict[str, Callable[[Transcription, str], Response]] = {
    "json": _json,
    "text": _text,
    "srt": _srt,
    "verbose_json": _verbose,
    "vtt": _vtt,
}
