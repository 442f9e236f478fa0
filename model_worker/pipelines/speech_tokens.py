"""Speech tokens within one process: a server's pipeline of text and its codec, whose next chunk is the next window.

Knows contexts of speech tokens. Does not know how tokens or samples are computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from interfaces import (
    AudioGenerationInputs,
    AudioGenerationMetadata,
    AudioGenerationOutput,
    CodecContext,
    Pipeline,
    PipelineAudioGenerator,
    PoolingTask,
    RequestID,
    SpeechContext,
    TextGenerationInputs,
)
from model_worker.pipelines.text import TextPipeline
from model_worker.speech.codec import SpeechCodec
from model_worker.speech.load_codec import load_codec
from shared.speech_tokens import SpeechTokenFiles, codes_of
from shared.speech_windows import Window, Windows


@dataclass
class _Spoken:
    """What has become of a request."""

    windows: Windows
    # Generated tokens that were read, and codes among them.
    read: int = 0
    codes: int = 0
    chunks: int = 0


class SpeechTokenPipeline(Pipeline[AudioGenerationInputs[SpeechContext], AudioGenerationOutput]):
    """Do not use it from two threads at once. `generator` is the same as an `AudioGenerator`.

    A context whose `buffer_speech_tokens` are the last ones of another sounds as if both were one; without them, its
    `audio_prompt_tokens` are what its sound goes on from.
    """

    def __init__(self, text: TextPipeline, codec: SpeechCodec, zeros: Sequence[int]) -> None:
        """`zeros` are the ids of the tokens of code 0, for each code of a frame."""
        if len(zeros) != len(codec.codebooks):
            raise ValueError(f"zeros must have {len(codec.codebooks)} tokens, one for each code, got {len(zeros)}")
        self._text = text
        self._codec = codec
        self._zeros = tuple(zeros)
        self._spoken: dict[RequestID, _Spoken] = {}

    @classmethod
    def load(
        cls,
        model: str | Path,
        zeros: Sequence[int],
        *,
        device: str = "cpu",
        dtype: str = "auto",
        max_batch_size: int = 16,
    ) -> SpeechTokenPipeline:
        """Load a checkpoint with a speech.json. ValueError says why it cannot be used."""
        files = SpeechTokenFiles.read(model)
        if files is None:
            raise ValueError(f"{model} has no speech.json that names a codec: write one (docs/speech.md)")
        text = TextPipeline.load(model, device=device, dtype=dtype, max_batch_size=max_batch_size)
        return cls(text, load_codec(files, device, text.max_length), zeros)

    def close(self) -> None:
        """End what the pipeline of text has started. Idempotent."""
        self._text.close()

    @property
    def max_length(self) -> int:
        """The most tokens that a prompt and its speech can have."""
        return self._text.max_length

    @property
    def sample_rate(self) -> int:
        return self._codec.facts.sample_rate

    @property
    def generator(self) -> PipelineAudioGenerator:
        """The pipeline as an `AudioGenerator`."""
        return PipelineAudioGenerator(self, self.sample_rate)

    def execute(self, inputs: AudioGenerationInputs[SpeechContext]) -> dict[RequestID, AudioGenerationOutput]:
        """Return the next chunk of each context: the next windows, or with `streaming` false all that there is.

        ValueError when the batch cannot be held, or when a request failed, as for text.
        """
        begun = time.monotonic()
        before = {name: self._state(context).read for name, context in inputs.batch.items()}
        found: dict[RequestID, list[Window]] = {name: self._ready(context) for name, context in inputs.batch.items()}
        while going := [one for name, one in inputs.batch.items() if self._waits(one, found[name])]:
            self._text.execute(TextGenerationInputs([going], num_steps=len(self._zeros)))
            for context in going:
                found[context.request_id] += self._ready(context)
        return {name: self._output(context, found[name], before[name], begun) for name, context in inputs.batch.items()}

    def release(self, request_id: RequestID) -> None:
        """Forget a request, and free what the pipeline of text has of it."""
        self._spoken.pop(request_id, None)
        self._text.release(request_id)

    def _state(self, context: SpeechContext) -> _Spoken:
        if context.request_id not in self._spoken:
            heard = (
                context.audio_prompt_tokens if context.buffer_speech_tokens is None else context.buffer_speech_tokens
            )
            windows = Windows(len(self._zeros), self._codec.facts, self._codes(heard, 0))
            self._spoken[context.request_id] = _Spoken(windows)
        return self._spoken[context.request_id]

    def _codes(self, tokens: NDArray[np.int64], before: int) -> list[int]:
        return codes_of(tokens.tolist(), self._zeros, self._codec.vocab_size, before)

    def _ready(self, context: SpeechContext) -> list[Window]:
        """Read the context's new tokens. Returns the windows that are complete with them."""
        state = self._state(context)
        fresh = context.tokens.generated[state.read :]
        codes = self._codes(fresh, state.codes)
        state.read += len(fresh)
        state.codes += len(codes)
        state.windows.add(codes)
        return list(state.windows.rest() if context.is_done else state.windows.ready())

    @staticmethod
    def _waits(context: SpeechContext, windows: Sequence[Window]) -> bool:
        """Whether more tokens are needed for the next chunk."""
        return not context.is_done and not (windows and context.streaming)

    def _output(
        self, context: SpeechContext, windows: Sequence[Window], before: int, begun: float
    ) -> AudioGenerationOutput:
        state = self._state(context)
        sounds = [self._decoded(window) for window in windows]
        samples = np.concatenate(sounds) if sounds else np.empty(0, np.float32)
        inside = sum(len(window.codes) // len(self._zeros) - window.left - window.right for window in windows)
        context.decoded_length += inside * len(self._zeros)
        metadata = AudioGenerationMetadata(
            sample_rate=self.sample_rate,
            duration=len(samples) / self.sample_rate,
            chunk_id=state.chunks,
            final_chunk=context.is_done,
            model_name=context.model_name or None,
            request_id=str(context.request_id),
            tokens_generated=state.read - before,
            processing_time=time.monotonic() - begun,
        )
        state.chunks += 1
        return AudioGenerationOutput(
            context.status,
            state.read - before,
            samples,
            self._last_tokens(context) if context.is_done else None,
            metadata,
        )

    def _last_tokens(self, context: SpeechContext) -> NDArray[np.int64]:
        """Return the tokens that the codec needs before the sound of a request that continues this one."""
        width = len(self._zeros)
        frames = max(0, self._codec.facts.left)
        codes = self._codes(context.tokens.generated, 0)
        whole = np.array(codes[: len(codes) // width * width], np.int64).reshape(-1, width)
        last: NDArray[np.int64] = (whole[max(0, len(whole) - frames) :] + np.array(self._zeros)).reshape(-1)
        return last

    def _decoded(self, window: Window) -> NDArray[np.float32]:
        values, _ = self._codec.run(
            CodecContext.of(
                [window.codes],
                PoolingTask.DECODE_SPEECH,
                width=len(self._zeros),
                left=window.left,
                right=window.right,
                first_frame=window.first_frame,
            )
        )
        return values[:, 0]
