"""The sound of a text from the model: cut into sentences, submitted, and handed out sentence by sentence.

Knows contexts, limits of the model, metrics and time; knows neither formats nor dialects.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from api_server.answers.observer import receiving
from api_server.answers.one_shot import OneShot, Sound
from api_server.engine import scheduling
from api_server.engine.pooling import StreamedSubmission
from api_server.errors import ErrorKind, RequestFailed
from api_server.pooling.report import Report
from api_server.speech.cloning import check_clip
from api_server.speech.generated import GeneratedSpeech, generate_speech
from api_server.speech.reading import random_seed, seeds_of, sentences_of, voice_of
from api_server.speech.wish import Wish
from api_server.state import ServerState
from api_server.text.pooled_model import IN_WORDS, ROUTES_OF_TASK
from api_server.text.speaking_model import SpeakingModel
from api_server.web.endpoint import Call
from interfaces import PoolingTask, RequestID, SynthesisContext
from shared.speech_files import SpeechFiles


@dataclass
class Speech:
    """Sound on its way. `pieces` gives each sentence once; `close` must be called at the end, whatever it is."""

    sample_rate: int
    # The seed of the first sentence's noise.
    seed: int
    # The number of sentences, and of their tokens.
    sentences: int
    tokens: int
    _server: ServerState
    _report: Report
    _sound: Sound
    _submission: StreamedSubmission
    # There are no speech tokens.
    output_tokens: int = field(default=0, init=False)

    @property
    def in_one_piece(self) -> bool:
        """Whether its length is known before any of it is sent."""
        return self.sentences == 1

    async def pieces(self) -> AsyncIterator[NDArray[np.float32]]:
        """The samples of each sentence, -1 to 1. Raises RequestFailed; the endpoint records it."""
        try:
            async for values in self._submission.texts():
                samples = values[:, 0]
                self._sound.first = self._sound.first or time.monotonic()
                self._sound.seconds += len(samples) / self.sample_rate
                yield samples
        except RequestFailed as error:
            self._report.failed(error)
            raise
        self._report.finished()

    @property
    def seconds(self) -> float:
        """The length of the sound so far."""
        return self._sound.seconds

    def close(self) -> None:
        """Ends the request, and its work if it still runs. Idempotent."""
        self._server.engine.cancel([self._submission])
        self._report.left()


async def speak(call: Call, wish: Wish, again: bool = False) -> Speech | GeneratedSpeech:
    """Submits a text. Raises RequestFailed for what the served model cannot speak.

    `again`: it belongs to a request that was in the queue before.
    """
    server = call.server
    files = check(server)
    check_clip(server, wish)
    if isinstance(files, SpeakingModel):
        return await generate_speech(call, files, wish, again)
    if wish.instructions:
        raise RequestFailed(
            ErrorKind.UNSUPPORTED, "instructions: this model takes none, so leave the field out", field="instructions"
        )
    with receiving(server.observers, call.path):
        voice = voice_of(files, wish.voice)
        read = await call.apart(lambda: sentences_of(files, wish.input, server.max_model_len))
    count = len(read)
    first = random_seed() if wish.seed is None else wish.seed
    context = SynthesisContext.of(
        read,
        PoolingTask.SPEAK,
        seeds=seeds_of(first, count),
        voice=voice,
        speed=wish.speed,
        request_id=RequestID(call.request_id),
        model_name=server.model_name,
    )
    sound = Sound()
    key = call.caller.name
    shot = OneShot(call.path, call.received, count, len(context.tokens), key, server.model_name, sound=sound)
    report = Report(server, shot)
    submission = server.engine.stream(context, scheduling.current.get(), again)
    return Speech(files.sample_rate, first, count, len(context.tokens), server, report, sound, submission)


def check(server: ServerState) -> SpeechFiles | SpeakingModel:
    """The facts of the served model. Raises RequestFailed(WRONG_TASK) when it does not speak."""
    if server.speaking is not None:
        return server.speaking
    model = server.pooled_model
    if model is None or model.speech is None:
        raise RequestFailed(
            ErrorKind.WRONG_TASK,
            f"this route needs a model that {IN_WORDS['speak']}, and {server.model_name!r} {IN_WORDS[server.task]} "
            f"(task {server.task}): serve a checkpoint of VITS or MMS, or one with speech.json, or ask "
            f"{ROUTES_OF_TASK[server.task]}",
        )
    return model.speech
