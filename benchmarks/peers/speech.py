"""Libraries that speak and transcribe in this process: transformers and faster-whisper.

transformers has one request at a time, as its pipelines do: others wait. A model of speech tokens, for which it has no
pipeline, speaks by `generate` and its codec. faster-whisper has as many workers as streams.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
import time
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speakers import Answer, Speaker

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
        # An English-only model takes no language there.
        file = Path(model) / "generation_config.json"
        known = json.loads(file.read_text()) if file.is_file() else {}
        named = {"language": language} if language and known.get("is_multilingual", True) else {}
        # The pipeline's own default is a search with five beams: others here decode greedily.
        self._options: dict[str, Any] = named | {"num_beams": 1}
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
            if (Path(self._model) / "speech.json").is_file():
                speaker = self._made.setdefault("tokens", None) or _SpeechTokens(Path(self._model))
                self._made["tokens"] = speaker
                return Answer(speaker.seconds(text), time.perf_counter() - began)
            found = self._pipeline("text-to-speech")(text)
        return Answer(np.asarray(found["audio"]).size / found["sampling_rate"], time.perf_counter() - began)

    def _transcribe(self, clip: bytes, seconds: float) -> Answer:
        began = time.perf_counter()
        given = {"raw": _samples(clip), "sampling_rate": 16_000}
        with self._lock:
            # Long sound goes window by window, each from the last timestamp on.
            self._pipeline("automatic-speech-recognition")(given, return_timestamps=True, generate_kwargs=self._options)
        return Answer(seconds, time.perf_counter() - began)


class _SpeechTokens:
    """A model of speech tokens in its own type, and its codec in float32. Its sound begins when it is complete."""

    def __init__(self, folder: Path) -> None:
        import transformers

        given = json.loads((folder / "speech.json").read_text())
        auto: Any = transformers
        self._tokenizer = auto.AutoTokenizer.from_pretrained(folder)
        self._model = auto.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        self._codec = auto.AutoModel.from_pretrained(folder / given["codec"]).eval()
        self._prompt: list[str] = given["prompt"]
        self._books = [book for book, _ in given["slots"]]
        self._zeros = [self._tokenizer.convert_tokens_to_ids(token) for _, token in given["slots"]]
        self._end = self._tokenizer.convert_tokens_to_ids(given["stop"][0])

    def seconds(self, text: str) -> float:
        """Speaks a text, and returns the length of its sound."""
        import torch

        parts = [part.replace("{text}", text) for part in self._prompt]
        prompt = [token for part in parts for token in self._tokenizer(part, add_special_tokens=False).input_ids]
        with torch.inference_mode():
            tokens = self._model.generate(
                torch.tensor([prompt]),
                do_sample=False,
                max_length=self._model.config.max_position_embeddings,
                logits_processor=[lambda ids, scores: self._ordered(ids.shape[1] - len(prompt), scores)],
                eos_token_id=self._end,
                pad_token_id=self._end,
            )[0, len(prompt) :]
            tokens = tokens[tokens != self._end]
            frames = tokens[: len(tokens) // len(self._zeros) * len(self._zeros)].reshape(-1, len(self._zeros))
            codes = torch.empty(1, len(self._books), len(frames), dtype=torch.long)
            codes[0, self._books] = (frames - torch.tensor(self._zeros)).T
            sound = self._codec.decode(audio_codes=codes).audio_values
        return float(sound.numel() / self._codec.config.sampling_rate)

    def _ordered(self, count: int, scores: Any) -> Any:
        """The logits of the tokens that may come after so many."""
        place = count % len(self._zeros)
        allowed = slice(self._zeros[place], self._zeros[place] + self._codec.config.codebook_size)
        kept = scores.clone().fill_(-float("inf"))
        kept[:, allowed] = scores[:, allowed]
        if count and not place:
            kept[:, self._end] = scores[:, self._end]
        return kept


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
