"""Answers of chat as sound: the model of the request writes, and a model of the same server that speaks reads it aloud.

A streamed answer is read sentence by sentence while it is written. Knows OpenAI's JSON forms.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np

from api_server.answers.choice import Choice
from api_server.chat.spoken import name_of
from api_server.dialects.openai import rendering
from api_server.dialects.openai.rendering import Envelope
from api_server.dialects.openai.schema import ChatBody
from api_server.dialects.openai.spoken_schema import AudioWish
from api_server.engine import resume
from api_server.errors import RequestFailed, invalid, unsupported
from api_server.generation.generation import Generation
from api_server.parsers.scanner import Thought
from api_server.speech.aloud import Aloud
from api_server.speech.encoding import Encoder, Format, check_installed, rate_of
from api_server.speech.sentences import SentenceReader, sentences
from api_server.state import ServerState
from api_server.web.endpoint import Call
from api_server.web.sse import DONE, frame

# Most characters of an answer whose sound is sent as one file.
MOST_CHARACTERS = 4096
# Seconds after which OpenAI's clients take a spoken answer for forgotten.
_KEPT_SECONDS = 3600
# Parts of a stream that wait for its client.
_MOST_WAITING = 16
# Names of fields of speech in a body of chat.
_NAMES = {name: f"audio.{name}" for name in ("voice", "ref_audio", "ref_text")} | {"response_format": "audio.format"}


class SpokenChat:
    """What speaks the answer to one request. `close` ends its work."""

    def __init__(self, call: Call, body: ChatBody, envelope: Envelope) -> None:
        """Raises RequestFailed for wishes that do not go together, and where no model speaks."""
        wish = body.audio or AudioWish()
        speaker = _speaker(call, wish)
        _check(call, body, wish)
        resume.current.set(None)
        kind: Format = "pcm" if wish.format == "pcm16" else wish.format
        try:
            check_installed(kind)
            seed = None if body.seed is None else body.seed % (1 << 63)
            self._aloud = Aloud(call, speaker, wish.voice_name, seed, wish.ref_audio or "", wish.ref_text or "")
        except RequestFailed as error:
            raise error.renamed(_NAMES) from None
        rate = self._aloud.sample_rate
        self._encoder = Encoder(kind, rate, rate_of(kind, rate, None))
        self._envelope = envelope
        self._options = body.stream_options
        self._parts: _Parts | None = None

    async def begin(self) -> None:
        """Make the voice of a clip, before any text is sent. Raises RequestFailed."""
        try:
            await self._aloud.begin()
        except RequestFailed as error:
            raise error.renamed(_NAMES) from None

    async def answer(self, generation: Generation) -> dict[str, Any]:
        """The whole body. Raises RequestFailed."""
        choices = await generation.collect()
        answer = rendering.chat_answer(self._envelope, choices, None)
        (choice,) = choices
        text = choice.answer.text
        if not text:
            return answer
        if len(text) > MOST_CHARACTERS:
            raise invalid(
                f"modalities: the answer has {len(text)} characters, and at most {MOST_CHARACTERS} are spoken as one "
                "file: stream it, or set max_completion_tokens",
                "modalities",
            )
        # Sentences are silent where there is nothing to speak.
        samples = [np.zeros(0, np.float32)]
        for sentence in sentences(text):
            samples += [each async for each in self._aloud.pieces(sentence)]
        data = await asyncio.to_thread(self._encoder.whole, np.concatenate(samples))
        audio = self._named(text) | {"data": base64.b64encode(data).decode(), "transcript": text}
        answer["choices"][0]["message"] |= {"content": None, "audio": audio}
        return answer | {"usage": self._usage(choice)}

    async def frames(self, generation: Generation) -> AsyncIterator[bytes]:
        """The role, then pieces of text and of sound as they come, then the answer's name and the reason."""
        (choice,) = generation.choices
        include_usage = self._options is not None and self._options.asks_for_usage
        more = {"usage": None} if include_usage else {}

        def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
            rendered = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
            return frame(self._envelope.around("chat.completion.chunk", [rendered], **more))

        yield chunk({"role": "assistant", "content": None})
        self._parts = _Parts(generation, self._aloud, self._encoder)
        async for delta in self._parts:
            yield chunk(delta)
        reason = rendering.finish_reason(choice.finish, bool(choice.answer.calls))
        if choice.answer.text:
            yield chunk({"audio": self._named(choice.answer.text)})
        yield chunk({}, reason)
        if include_usage:
            yield frame(self._envelope.around("chat.completion.chunk", [], usage=self._usage(choice)))
        yield DONE

    def close(self) -> None:
        """Ends what is still spoken. Idempotent."""
        if self._parts is not None:
            self._parts.close()
        self._aloud.close()

    def _named(self, text: str) -> dict[str, Any]:
        return {"id": name_of(text), "expires_at": self._envelope.created + _KEPT_SECONDS}

    def _usage(self, choice: Choice) -> dict[str, Any]:
        """The usage, to which speech tokens belong."""
        usage = rendering.usage([choice])
        spoken = self._aloud.output_tokens
        usage["completion_tokens"] += spoken
        usage["total_tokens"] += spoken
        usage["completion_tokens_details"]["audio_tokens"] = spoken
        return usage


class _Parts:
    """The deltas of an answer that is written and read aloud at the same time, in the order in which they come."""

    def __init__(self, generation: Generation, aloud: Aloud, encoder: Encoder) -> None:
        self._generation = generation
        self._aloud = aloud
        self._encoder = encoder
        # None: all is there. A failure ends them, too.
        self._parts: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue(_MOST_WAITING)
        # Their number is bounded by the length of the answer.
        self._sentences: asyncio.Queue[str | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    def close(self) -> None:
        """Ends what still runs. Idempotent."""
        for task in self._tasks:
            task.cancel()

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        # Each has a context of its own: speech has other limits of time than the text.
        self._tasks = [asyncio.create_task(self._guarded(work)) for work in (self._write, self._speak)]
        while (part := await self._parts.get()) is not None:
            if isinstance(part, Exception):
                raise part
            yield part

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:
            await self._parts.put(error)

    async def _write(self) -> None:
        reader = SentenceReader()
        async for delta in self._generation:
            for piece in delta.pieces:
                if isinstance(piece, Thought) or piece.content is None:
                    await self._parts.put(rendering.delta_of(piece))
                    continue
                await self._parts.put({"audio": {"transcript": piece.content}})
                for sentence in reader.add(piece.content):
                    self._sentences.put_nowait(sentence)
        for sentence in reader.end():
            self._sentences.put_nowait(sentence)
        self._sentences.put_nowait(None)

    async def _speak(self) -> None:
        while (sentence := await self._sentences.get()) is not None:
            async for samples in self._aloud.pieces(sentence):
                await self._send(await asyncio.to_thread(self._encoder.part, samples))
        await self._send(await asyncio.to_thread(self._encoder.rest))
        await self._parts.put(None)

    async def _send(self, data: bytes) -> None:
        if data:
            await self._parts.put({"audio": {"data": base64.b64encode(data).decode()}})


def _check(call: Call, body: ChatBody, wish: AudioWish) -> None:
    """Refuses wishes that do not go together. Raises RequestFailed."""
    if (body.n or 1) > 1:
        raise invalid(f"n must be 1 for an answer that is spoken, got {body.n}", "n")
    if body.stream and wish.format != "pcm16":
        raise invalid(f"audio.format must be pcm16 with stream, got {wish.format!r}", "audio.format")
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise unsupported("stream_options.continuous_usage_stats", "usage in each chunk of a spoken answer")
    for name in ("logprobs", "prompt_logprobs", "return_token_ids"):
        if getattr(body, name) not in (None, False):
            raise unsupported(name, "this field of a spoken answer")
    if call.scope["state"].get("resume") is not None:
        raise unsupported(resume.HEADER, "taking up a spoken answer again")


def _speaker(call: Call, wish: AudioWish) -> ServerState:
    """The state of the model that speaks. Raises RequestFailed."""
    server: ServerState = call.scope["state"]["server"]
    if wish.model is None and not any(state.speaks for state in server.models):
        raise unsupported(
            "modalities", "audio without a model that speaks (start it with --also NAME=MODEL beside this one)"
        )
    return server.that_speaks(wish.model)
