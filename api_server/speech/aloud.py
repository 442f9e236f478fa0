"""Speaks a text that is not known as a whole yet: sentence by sentence, each as a request for speech.

Knows the time that is left; knows neither formats nor dialects.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from api_server.engine import scheduling
from api_server.speech.cloning import check_clip, voice_of_clip
from api_server.speech.generated import GeneratedSpeech
from api_server.speech.reading import MOST_SEED, random_seed, voice_of
from api_server.speech.speaking import Speech, check, speak
from api_server.speech.wish import Wish
from api_server.state import ServerState
from api_server.text.speaking_model import SpeakingModel
from api_server.web.endpoint import Call


class Aloud:
    """The sound of sentences, one behind the other. `close` ends what still runs."""

    def __init__(
        self,
        call: Call,
        server: ServerState,
        voice: str | None,
        seed: int | None,
        ref_audio: str = "",
        ref_text: str = "",
    ) -> None:
        """`server` is the state of the model that speaks. Raises RequestFailed for a voice that it lacks, and for a
        clip of one that it takes none of."""
        # To metrics each sentence is a request of the route for speech.
        self._call = replace(call, server=server, scope={**call.scope, "path": "/v1/audio/speech"})
        self._files = check(server)
        if isinstance(self._files, SpeakingModel):
            self._files.voice(voice)
        else:
            voice_of(self._files, voice)
        self._wish = Wish(input="", voice=voice, ref_audio=ref_audio, ref_text=ref_text)
        check_clip(server, self._wish)
        self.sample_rate = self._files.sample_rate
        # Speech tokens so far.
        self.output_tokens = 0
        self._seed = random_seed() if seed is None else seed
        self._spoken: Speech | GeneratedSpeech | None = None
        seconds = scheduling.current.get().total_seconds
        self._deadline = None if seconds is None else time.monotonic() + seconds

    async def begin(self) -> None:
        """Make the voice of a clip, if there is one: once for all sentences. Raises RequestFailed."""
        if self._wish.ref_audio and isinstance(self._files, SpeakingModel):
            imitated = await voice_of_clip(self._call, self._files, self._wish)
            self._wish = replace(self._wish, imitated=imitated, ref_audio="", ref_text="")

    async def pieces(self, sentence: str) -> AsyncIterator[NDArray[np.float32]]:
        """The samples of a sentence, -1 to 1; none where it has nothing that the model can speak. Raises
        RequestFailed."""
        if not self._can_speak(sentence):
            return
        # It belongs to a request that was admitted: that has one time limit, and waits however long the queue is.
        left = None if self._deadline is None else max(0.001, self._deadline - time.monotonic())
        scheduling.current.set(replace(scheduling.current.get(), total_seconds=left, queue_seconds=None))
        spoken = await speak(self._call, replace(self._wish, input=sentence, seed=self._seed), again=True)
        self._seed = (self._seed + 1) % (MOST_SEED + 1)
        self._spoken = spoken
        try:
            async for samples in spoken.pieces():
                yield samples
            self.output_tokens += spoken.output_tokens
        finally:
            spoken.close()

    def close(self) -> None:
        """Ends what still runs. Idempotent."""
        if self._spoken is not None:
            self._spoken.close()

    def _can_speak(self, sentence: str) -> bool:
        """Whether there is anything to be heard. Signs alone are silent, and so are letters that the model lacks."""
        if isinstance(self._files, SpeakingModel):
            return any(map(str.isalnum, sentence))
        return self._files.foreign_letter(sentence) is None and bool(self._files.ids_of(sentence))
