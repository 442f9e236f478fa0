"""One server of the tiny model for all of this folder: it survives everything that is done to it here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.streams import Heard, Request, requests
from tests.chaos.waves import run, shared_memory
from tests.system.conftest import model
from tests.system.server import Server

__all__ = ["model"]

FLAGS = ["--dtype", "float32", "--kv-memory", "64MB", "--stall-timeout", "1", "--api-servers", "2"]
STREAMS = 32


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    memory = shared_memory()
    with Server(model, FLAGS, tmp_path_factory.mktemp("chaos") / "log") as running:
        yield running
    assert shared_memory() <= memory


@pytest.fixture(scope="session")
def asked() -> list[Request]:
    return requests(STREAMS)


@pytest.fixture(scope="session")
def undisturbed(server: Server, asked: list[Request]) -> list[Heard]:
    heard = run(server, asked)
    assert [one.problem for one in heard] == [""] * STREAMS
    return heard
