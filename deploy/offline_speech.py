"""Speech within this process: the API server's reading of a text joined to the worker's model.

Knows one checkpoint. Knows neither requests nor a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_server.errors import RequestFailed
from api_server.speech.reading import MOST_SEED, seeds_of, sentences_of, voice_of
from interfaces import AudioGenerationInputs, PoolingTask, SynthesisContext
from model_worker.pipelines.speech import SpeechPipeline
from shared.speech_files import SpeechFiles

# Options of LLM that models that speak have, too.
_OPTIONS = ("device", "dtype")


@dataclass(frozen=True)
class Sound:
    """Samples from -1 to 1, and how many of them a second has."""

    samples: NDArray[np.float32]
    sample_rate: int


class TextSpeaker:
    """A checkpoint that speaks. Do not use it from two threads at once."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        """Load the model. ValueError gives the reason when it cannot be."""
        self._files = SpeechFiles.read(model)
        self._pipeline = SpeechPipeline.load(model, **{name: options[name] for name in _OPTIONS if name in options})

    def context(self, text: str, voice: str | None, speed: float, seed: int) -> SynthesisContext:
        """Make the context of a text. ValueError names what is wrong."""
        if not 0 <= seed <= MOST_SEED:
            raise ValueError(f"seed must be from 0 to {MOST_SEED}, got {seed}")
        try:
            sentences = sentences_of(self._files, text, self._pipeline.max_length)
            number = voice_of(self._files, voice)
        except RequestFailed as error:
            raise ValueError(error.message) from None
        seeds = seeds_of(seed, len(sentences))
        return SynthesisContext.of(sentences, PoolingTask.SPEAK, seeds=seeds, voice=number, speed=speed)

    def speak(self, text: str, voice: str | None, speed: float, seed: int) -> Sound:
        """Speak a text, sentence by sentence."""
        context = self.context(text, voice, speed, seed)
        name = context.request_id
        pieces = []
        try:
            for _ in range(len(context)):
                pieces.append(self._pipeline.execute(AudioGenerationInputs({name: context}))[name].audio_data)
        finally:
            self._pipeline.release(name)
        return Sound(np.concatenate(pieces), self._files.sample_rate)
