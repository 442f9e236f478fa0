"""Libraries that speak and transcribe in this process: transformers by its pipelines, and faster-whisper.

transformers has one request at a time, as its pipelines do: others wait. faster-whisper has as many workers as streams.
"""

from __future__ import annotations

import asyncio
import io
import os
import threading
import time
import wave
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.speech import Answer, Speaker

# faster-whisper's transcriptions at once.
_WORKERS = 8


def peer(name: str, model: str, language: str) -> Speaker:
    """Load a library's model. Raises ValueError and ImportError."""
    if not model:
        raise ValueError("--model must name the folder of the model that the library loads")
    return _Transformers(model, language) if name == "transformers" else _FasterWhisper(model, language)


def _samples(clip: bytes) -> Any:
    with wave.open(io.BytesIO(clip)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32767


class _Transformers:
    """A pipeline of transformers for the model's task, made when it is first wanted."""

    def __init__(self, model: str, language: str) -> None:
        self._model = model
        self._options = {"language": language} if language else {}
        self._made: dict[str, Any] = {}
        self._lock = threading.Lock()

    async def speak(self, text: str) -> Answer:
        return await asyncio.to_thread(self._speak, text)

    async def transcribe(self, clip: bytes, seconds: float) -> Answer:
        return await asyncio.to_thread(self._transcribe, clip, seconds)

    def _pipeline(self, task: str) -> Any:
        import transformers

        if task not in self._made:
            self._made[task] = transformers.pipeline(task, model=self._model)  # type: ignore[call-overload]
        return self._made[task]

    def _speak(self, text: str) -> Answer:
        began = time.perf_counter()
        with self._lock:
            found = self._pipeline("text-to-speech")(text)
        return Answer(np.asarray(found["audio"]).size / found["sampling_rate"], time.perf_counter() - began)

    def _transcribe(self, clip: bytes, seconds: float) -> Answer:
        began = time.perf_counter()
        given = {"raw": _samples(clip), "sampling_rate": 16_000}
        with self._lock:
            # Long sound goes window by window, each from the last timestamp on.
            self._pipeline("automatic-speech-recognition")(given, return_timestamps=True, generate_kwargs=self._options)
        return Answer(seconds, time.perf_counter() - began)


class _FasterWhisper:
    """A model of faster-whisper, with greedy decoding and without its fallbacks to other temperatures."""

    def __init__(self, model: str, language: str) -> None:
        import faster_whisper  # type: ignore[import-not-found]

        threads = max(1, (os.cpu_count() or 1))
        self._model = faster_whisper.WhisperModel(model, device="auto", cpu_threads=threads, num_workers=_WORKERS)
        self._language = language or None
        self._pool = ThreadPoolExecutor(_WORKERS)

    async def speak(self, text: str) -> Answer:
        raise ValueError("--work must be A2 for faster-whisper, which speaks nothing")

    async def transcribe(self, clip: bytes, seconds: float) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._transcribe, clip, seconds)

    def _transcribe(self, clip: bytes, seconds: float) -> Answer:
        began = time.perf_counter()
        segments, _ = self._model.transcribe(
            _samples(clip), language=self._language, beam_size=1, temperature=0.0, condition_on_previous_text=False
        )
        for _ in segments:
            pass
        return Answer(seconds, time.perf_counter() - began)
