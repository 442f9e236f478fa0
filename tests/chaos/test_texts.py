"""The short form of the stream of texts: a worker and a scheduler die, and each vector arrives."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from tests.chaos.texts import FLAGS, stream
from tests.system.pooling_models import make_embedder
from tests.system.server import Server


def test_each_vector_arrives_and_is_the_same_whoever_dies(tmp_path: Path) -> None:
    seed = random.getrandbits(32)
    with Server(make_embedder(tmp_path / "embedder"), FLAGS, tmp_path / "log") as server:
        found = asyncio.run(stream(server, 60, ("model_worker", "scheduler"), 2.0, random.Random(seed)))
    assert found.clean, f"seed {seed}: lost {found.lost[:3]}, changed {found.changed[:3]}"
    assert found.killed == ["model_worker", "scheduler"]
    assert len(found.seconds) == found.sent > 200
