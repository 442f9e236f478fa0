"""What the benchmark of speech measures: anything that speaks texts and transcribes clips, such as a server."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import aiohttp


@dataclass(frozen=True)
class Answer:
    """One request's figures: seconds of its sound, and seconds to the first of its sound or text."""

    sound: float
    first: float


class Speaker(Protocol):
    """What speaks texts and transcribes clips. Raises ValueError."""

    async def speak(self, text: str) -> Answer: ...

    async def transcribe(self, clip: bytes, seconds: float) -> Answer: ...


class Server:
    """A server with OpenAI's routes."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, language: str) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._model = model
        self._language = language

    async def speak(self, text: str) -> Answer:
        """Speaks a text as raw samples of 24 kHz."""
        body = {"model": self._model, "input": text, "voice": "default", "response_format": "pcm"}
        began = time.perf_counter()
        first = 0.0
        size = 0
        async with self._session.post(f"{self._url}/v1/audio/speech", json=body) as response:
            await _check(response)
            async for part in response.content.iter_any():
                first = first or time.perf_counter() - began
                size += len(part)
        return Answer(size / 2 / 24_000, first)

    async def transcribe(self, clip: bytes, seconds: float) -> Answer:
        """Transcribes a clip."""
        form = aiohttp.FormData()
        form.add_field("file", clip, filename="a.wav")
        form.add_field("model", self._model)
        if self._language:
            form.add_field("language", self._language)
        began = time.perf_counter()
        async with self._session.post(f"{self._url}/v1/audio/transcriptions", data=form) as response:
            await _check(response)
            await response.read()
        return Answer(seconds, time.perf_counter() - began)


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise ValueError(f"{response.url} answered {response.status}: {(await response.text())[:300]}")
