"""A scheduler double that paints, and the real server before it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

from api_server.text.tokenizer import Tokenizer
from interfaces import PaintingContext, PooledValues, RequestError, Vectors
from shared.endpoints import RunDirectory
from shared.pooling_files import PoolingFiles
from shared.settings import Settings
from shared.sockets import send_to
from tests.api_server.conftest import LiveServer, serving
from tests.api_server.scheduler_double import SchedulerDouble
from tests.model_worker.pixels.tiny_tokenizer import tokenizer_of


def image_of(context: PaintingContext, seed: int) -> NDArray[np.float32]:
    """What the double's model makes of a description: smooth, so that lossy formats keep it."""
    height, width = np.mgrid[0 : context.height, 0 : context.width].astype(np.float32)
    shade = np.float32(seed % 7) / 10
    pixels = np.stack([height / context.height, width / context.width, np.full_like(height, shade)], -1)
    return pixels.reshape(context.height, -1)


@dataclass
class PaintingDouble(SchedulerDouble):
    """A scheduler whose model paints; at most the first `most` images of a request."""

    tasks: list[str] = field(default_factory=lambda: ["paint"])
    most: int = 1000
    failure: RequestError | None = None

    def __post_init__(self) -> None:
        self._painted: dict[tuple[bytes, int], int] = {}
        super().__post_init__()

    @property
    def contexts(self) -> list[PaintingContext]:
        return [submit.context for submit in self.submits if isinstance(submit.context, PaintingContext)]

    def _pool(self, router: zmq.Socket[bytes]) -> None:
        for key, context in list(self.pooling.items()):
            assert isinstance(context, PaintingContext)
            replica, handle = key
            # The second preview comes twice: the image was begun again.
            for number in [*range(1, context.previews + 1), *([2] if context.previews > 1 else [])]:
                values = PooledValues(image_of(context, number), np.array([context.height], np.int32))
                send_to(router, replica, Vectors(self.incarnation, handle, 0, values, self.queued_us, preview=number))
            first = self._painted.get(key, 0)
            end = min(len(context), self.most)
            # The images of a request are done in any order.
            for i in reversed(range(first, end)):
                pixels = image_of(context, int(context.seeds[i]))
                values = PooledValues(pixels, np.array([len(pixels)], np.int32))
                send_to(router, replica, Vectors(self.incarnation, handle, i, values, self.queued_us))
            self._painted[key] = max(first, end)
            if end == len(context):
                del self.pooling[key]
            elif self.failure is not None:
                send_to(router, replica, self._refusal(self.submits[-1], self.failure))
                del self.pooling[key]


@dataclass(frozen=True)
class PaintingServer:
    live: LiveServer
    double: PaintingDouble

    @property
    def url(self) -> str:
        return self.live.url


def files_of(folder: Path, kind: str = "StableDiffusionPipeline", **denoiser: Any) -> Path:
    """The files of a pipeline that the API server reads: no weights."""
    name = "transformer" if kind == "StableDiffusion3Pipeline" else "unet"
    facts = {
        "model_index.json": {"_class_name": kind, "scheduler": ["diffusers", "DDIMScheduler"]},
        f"{name}/config.json": {"sample_size": 16} | denoiser,
        "vae/config.json": {"block_out_channels": [8, 16]},
    }
    for path, content in facts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(content))
    tokenizer_of().save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture(scope="session")
def painter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files_of(tmp_path_factory.mktemp("models") / "tiny-painter")


@pytest.fixture
def painting(run_directory: RunDirectory, painter: Path) -> Iterator[PaintingServer]:
    tokenizer = Tokenizer.load(PoolingFiles.read(painter).tokenizer_source)
    double = PaintingDouble(run_directory.api_endpoint, lambda _: [], max_model_len=77, vocab_size=tokenizer.vocab_size)
    try:
        with serving(double, run_directory, tokenizer, Settings(model=str(painter))) as live:
            yield PaintingServer(live, double)
    finally:
        double.close()
