"""Speech tokens within this process: the API server's reading of a text, the pipeline of text, and the codec.

Knows one checkpoint. Knows neither requests nor a server.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from api_server.errors import RequestFailed
from api_server.speech.reading import MOST_SEED
from api_server.speech.sentences import parts_of
from api_server.text.speaking_model import SpeakingModel
from api_server.text.tokenizer import Tokenizer
from deploy.offline_speech import Sound
from interfaces import CodecContext, PoolingTask, SamplingParams, TextContext, TextGenerationInputs
from model_worker.pipelines.text import TextPipeline
from model_worker.speech.load_codec import load_codec
from shared.speech_windows import Window, Windows

# Tokens that a part gets between two looks at the windows that are complete.
_STEPS_AT_A_TIME = 64


class TokenSpeaker:
    """A checkpoint that generates speech tokens. Do not use it from two threads at once."""

    def __init__(self, model: str, text: TextPipeline) -> None:
        """Load the codec beside a pipeline of the model. ValueError gives the reason when it cannot be."""
        self._tokenizer = Tokenizer.load(model)
        found = SpeakingModel.of(model, self._tokenizer)
        assert found is not None
        self._model = found
        self._text = text
        self._codec = load_codec(found.files, text.device, text.max_length)

    def close(self) -> None:
        self._tokenizer.close()

    def speak(self, text: str, voice: str | None, speed: float, seed: int) -> Sound:
        """Speak a text, part by part, as a server does. ValueError names what is wrong."""
        if speed != 1:
            raise ValueError(f"speed must be 1 for a model that generates speech tokens, got {speed:g}")
        if not 0 <= seed <= MOST_SEED:
            raise ValueError(f"seed must be from 0 to {MOST_SEED}, got {seed}")
        model = self._model
        facts = self._codec.facts
        try:
            chosen = model.voice(voice)
            prompts = model.prompts(parts_of(text, model.files.characters), chosen, "")
            sampling = [
                model.sampling((seed + i) % (MOST_SEED + 1), len(prompt), facts, self._text.max_length)
                for i, prompt in enumerate(prompts)
            ]
        except RequestFailed as error:
            raise ValueError(error.message) from None
        windows = Windows(model.files.width, facts, model.codes_of(list(chosen.tokens), 0))
        sounds = [
            self._decoded(window)
            for prompt, values in zip(prompts, sampling, strict=True)
            for window in self._windows_of(prompt, values, windows)
        ]
        sounds += [self._decoded(window) for window in windows.rest()]
        return Sound(np.concatenate(sounds), facts.sample_rate)

    def _windows_of(self, prompt: list[int], sampling: SamplingParams, windows: Windows) -> Iterator[Window]:
        """The windows that are complete while a part is generated."""
        context = TextContext.from_prompt(np.array(prompt, np.int32), sampling)
        read = 0
        count = 0
        try:
            while not context.is_done:
                self._text.execute(TextGenerationInputs([[context]], num_steps=_STEPS_AT_A_TIME))
                fresh = context.tokens.generated[read:].tolist()
                read += len(fresh)
                codes = self._model.codes_of(fresh, count)
                count += len(codes)
                windows.add(codes)
                yield from windows.ready()
        finally:
            self._text.release(context.request_id)
        windows.end_part()
        if self._codec.facts.is_whole:
            yield from windows.rest()

    def _decoded(self, window: Window) -> NDArray[np.float32]:
        values, _ = self._codec.run(
            CodecContext.of(
                [window.codes],
                PoolingTask.DECODE_SPEECH,
                width=self._model.files.width,
                left=window.left,
                right=window.right,
                first_frame=window.first_frame,
            )
        )
        return values[:, 0]
