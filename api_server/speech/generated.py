"""The sound of a text from a model that generates speech tokens: parts of the text through the path that all generation
takes, and windows of their codes through the codec beside the model.

All parts are one stream of codes, so the sound has no seam where they join. Knows contexts, limits, metrics and time;
knows neither formats nor dialects.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from api_server.answers.choice import complete
from api_server.answers.observer import receiving
from api_server.answers.one_shot import OneShot, Sound
from api_server.engine import resume, scheduling
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.generation.generation import Generation
from api_server.generation.preparation import Prepared
from api_server.pooling.report import Report
from api_server.speech.cloning import voice_of_clip
from api_server.speech.reading import MOST_SEED, random_seed
from api_server.speech.sentences import parts_of
from api_server.speech.wish import Wish
from api_server.state import ServerState
from api_server.text.speaking_model import SpeakingModel
from api_server.text.tokenizer import Prompt
from api_server.web.endpoint import Call
from interfaces import CodecContext, CodecFacts, PoolingTask, RequestID, SamplingParams, TextGenerationRequest
from shared.speech_tokens import Voice
from shared.speech_windows import Window, Windows


class GeneratedSpeech:
    """Sound on its way. `pieces` gives each window once; `close` must be called at the end, whatever it is."""

    # Its length is not known before its end.
    in_one_piece = False

    def __init__(
        self,
        call: Call,
        model: SpeakingModel,
        codec: CodecFacts,
        seed: int | None,
        voice: Voice,
        prompts: list[list[int]],
    ) -> None:
        self.sample_rate = codec.sample_rate
        # The seed of the first part; each has the next one.
        self.seed = random_seed() if seed is None else seed
        self.tokens = sum(map(len, prompts))
        self._server: ServerState = call.server
        self._call = call
        self._model = model
        self._codec = codec
        self._prompts = prompts
        limit = self._server.max_model_len
        self._sampling = [
            model.sampling((self.seed + i) % (MOST_SEED + 1), len(prompt), codec, limit)
            for i, prompt in enumerate(prompts)
        ]
        self._windows = Windows(model.files.width, codec, model.codes_of(list(voice.tokens), 0))
        self._generation: Generation | None = None
        self._sound = Sound()
        key = call.caller.name
        self._shot = OneShot(
            call.path, call.received, len(prompts), self.tokens, key, self._server.model_name, sound=self._sound
        )
        self._report = Report(self._server, self._shot)
        seconds = scheduling.current.get().total_seconds
        self._deadline = None if seconds is None else time.monotonic() + seconds

    @property
    def seconds(self) -> float:
        """The length of the sound so far."""
        return self._sound.seconds

    @property
    def output_tokens(self) -> int:
        """Speech tokens so far."""
        return self._shot.generated

    def begin(self, again: bool = False) -> None:
        """Send the first part to the model. `again`: it belongs to a request that was in the queue before."""
        self._generation = self._started(0, again)

    async def pieces(self) -> AsyncIterator[NDArray[np.float32]]:
        """The samples of each window, -1 to 1. Raises RequestFailed; the endpoint records it."""
        try:
            for i in range(len(self._prompts)):
                async for window in self._windows_of(i):
                    yield await self._decoded(window)
            for window in self._windows.rest():
                yield await self._decoded(window)
            if self._sound.first is None:
                raise RequestFailed(
                    ErrorKind.GENERATION_FAILED, "the model has made no sound of this text: try another seed"
                )
        except RequestFailed as error:
            self._report.failed(error)
            raise
        self._report.finished()

    def close(self) -> None:
        """Ends the request, and its work if it still runs. Idempotent."""
        if self._generation is not None:
            self._generation.close()
        self._report.left()

    async def _windows_of(self, i: int) -> AsyncIterator[Window]:
        """The windows that are complete while a part is generated."""
        generation = self._generation if i == 0 and self._generation is not None else self._started(i)
        choice = generation.choices[0]
        read = 0
        count = 0
        async for _ in generation:
            fresh = choice.context.tokens.generated[read : choice.completion_tokens].tolist()
            read += len(fresh)
            self._shot.generated += len(fresh)
            codes = self._model.codes_of(fresh, count)
            count += len(codes)
            self._windows.add(codes)
            for window in self._windows.ready():
                yield window
        complete(choice.finish)
        self._windows.end_part()
        for window in self._joined():
            yield window

    def _joined(self) -> Iterator[Window]:
        """The window of a part that is decoded as a whole; none where the sound of the next part goes on from it."""
        if self._codec.is_whole:
            yield from self._windows.rest()

    async def _decoded(self, window: Window) -> NDArray[np.float32]:
        context = CodecContext.of(
            [window.codes],
            PoolingTask.DECODE_SPEECH,
            width=self._model.files.width,
            left=window.left,
            right=window.right,
            first_frame=window.first_frame,
            request_id=RequestID(self._call.request_id),
            model_name=self._server.model_name,
        )
        # It belongs to a request that was admitted, and is not refused for the queue's length.
        options = replace(scheduling.current.get(), total_seconds=self._left(), queue_seconds=None)
        values = await self._server.engine.pool(context, options, again=True)
        samples = values.array[:, 0]
        self._sound.first = self._sound.first or time.monotonic()
        self._sound.seconds += len(samples) / self.sample_rate
        return samples

    def _left(self) -> float | None:
        """Seconds of the request's time that are left."""
        return None if self._deadline is None else max(0.001, self._deadline - time.monotonic())

    def _started(self, i: int, again: bool = True) -> Generation:
        """Sends a part of the text to the model."""
        given = scheduling.current.get()
        # What was admitted once goes on: it has no limit in the queue.
        queue_seconds = None if again else given.queue_seconds
        scheduling.current.set(replace(given, total_seconds=self._left(), queue_seconds=queue_seconds))
        # Sound has no tokens that a client could name.
        resume.current.set(None)
        item = self._prepared(self._prompts[i], self._sampling[i])
        self._generation = Generation(self._server, [item], part=True, again=again)
        return self._generation

    def _prepared(self, ids: list[int], sampling: SamplingParams) -> Prepared:
        request = TextGenerationRequest(
            RequestID(self._call.request_id),
            model_name=self._server.model_name,
            request_path=self._call.path,
            prompt=ids,
            sampling_params=sampling,
            received=self._call.received,
        )
        return Prepared(request, Prompt(None, np.array(ids, np.int32)), sampling)


async def generate_speech(call: Call, model: SpeakingModel, wish: Wish, again: bool = False) -> GeneratedSpeech:
    """Submits a text, `again` one of a request that was in the queue before.

    Raises RequestFailed for what the model cannot speak.
    """
    server = call.server
    with receiving(server.observers, call.path):
        if wish.speed != 1:
            raise invalid(f"speed must be 1 for a model that generates speech tokens, got {wish.speed:g}", "speed")
        voice = await _voice(call, model, wish)
        prompts = await call.apart(
            lambda: model.prompts(parts_of(wish.input, model.files.characters), voice, wish.instructions)
        )
    codec = server.engine.model.codec
    if codec is None:
        reason = server.health.reason or "no model worker has reported its codec"
        raise RequestFailed(ErrorKind.UNAVAILABLE, f"the model is not loaded yet: {reason}")
    speech = GeneratedSpeech(call, model, codec, wish.seed, voice, prompts)
    speech.begin(again)
    return speech


async def _voice(call: Call, model: SpeakingModel, wish: Wish) -> Voice:
    """The voice that a wish names, or that of its clip. Raises RequestFailed."""
    if wish.imitated is not None:
        return wish.imitated
    return await voice_of_clip(call, model, wish) if wish.ref_audio else model.voice(wish.voice)
