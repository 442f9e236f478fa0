"""A scheduler double that speaks, and the real server before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

from api_server.text.tokenizer import Tokenizer
from interfaces import PooledValues, RequestError, SynthesisContext, Vectors
from shared.endpoints import RunDirectory
from shared.settings import Settings
from shared.sockets import send_to
from shared.speech_files import SpeechFiles
from tests.api_server.conftest import LiveServer, serving
from tests.api_server.scheduler_double import SchedulerDouble
from tests.model_worker.speech.tiny_vits import files_of

# Of the double's model, as the files say.
SAMPLE_RATE = 8000


def sound_of(tokens: NDArray[np.int32], seed: int, speed: float) -> NDArray[np.float32]:
    """What the double's model makes of a sentence: it depends on every token, and on the seed."""
    noise = np.random.default_rng([seed, *tokens.tolist()]).uniform(-0.5, 0.5, int(80 * len(tokens) / speed))
    return noise.astype(np.float32)


@dataclass
class SpeechDouble(SchedulerDouble):
    """A scheduler whose model speaks at most the first `most` sentences of a request, and may fail then."""

    tasks: list[str] = field(default_factory=lambda: ["speak"])
    most: int = 1000
    failure: RequestError | None = None

    def __post_init__(self) -> None:
        self._spoken: dict[tuple[bytes, int], int] = {}
        super().__post_init__()

    @property
    def contexts(self) -> list[SynthesisContext]:
        return [submit.context for submit in self.submits if isinstance(submit.context, SynthesisContext)]

    def _pool(self, router: zmq.Socket[bytes]) -> None:
        for key, context in list(self.pooling.items()):
            assert isinstance(context, SynthesisContext)
            replica, handle = key
            first = self._spoken.get(key, 0)
            end = min(len(context), self.most)
            for i in range(first, end):
                sound = sound_of(context.texts()[i], int(context.seeds[i]), context.speed)
                values = PooledValues(sound[:, None], np.array([len(sound)], np.int32))
                send_to(router, replica, Vectors(self.incarnation, handle, i, values, self.queued_us))
            self._spoken[key] = max(first, end)
            if end == len(context):
                del self.pooling[key]
            elif self.failure is not None:
                send_to(router, replica, self._refusal(self.submits[-1], self.failure))
                del self.pooling[key]


@dataclass(frozen=True)
class SpeechServer:
    live: LiveServer
    double: SpeechDouble
    files: SpeechFiles

    @property
    def url(self) -> str:
        return self.live.url

    def sound(self, context: SynthesisContext) -> NDArray[np.float32]:
        """The samples of a whole request."""
        pairs = zip(context.texts(), context.seeds.tolist(), strict=True)
        return np.concatenate([sound_of(text, seed, context.speed) for text, seed in pairs])


@pytest.fixture(scope="session")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"num_speakers": 3, "speaker_embedding_size": 8}
    return files_of(tmp_path_factory.mktemp("models") / "tiny-speaker", **sizes)


@pytest.fixture
def speaking(run_directory: RunDirectory, speaker: Path) -> Iterator[SpeechServer]:
    tokenizer = Tokenizer.load(str(speaker))
    double = SpeechDouble(run_directory.api_endpoint, lambda _: [], max_model_len=1024, vocab_size=tokenizer.vocab_size)
    try:
        with serving(double, run_directory, tokenizer, Settings(model=str(speaker))) as live:
            yield SpeechServer(live, double, SpeechFiles.read(speaker))
    finally:
        double.close()
