"""One server of the tiny model for all of this folder: it survives everything that is done to it here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos.killing import FLAGS
from tests.chaos.streams import Heard, Request, requests
from tests.chaos.waves import run, shared_memory
from tests.system.conftest import model
from tests.system.server import Server

__all__ = ["model"]

STREAMS = 32


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(model, tmp_path_factory)


@pytest.fixture(scope="session")
def second(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """For more deaths: after five in a row that come too soon a supervisor gives up.

    Its operator has PYTHONOPTIMIZE=2, with which transformers cannot be imported.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONOPTIMIZE", "2")
        server = _serve(model, tmp_path_factory)
        running = next(server)
    yield running
    yield from server


def _serve(model: Path, folders: pytest.TempPathFactory) -> Iterator[Server]:
    memory = shared_memory()
    with Server(model, FLAGS, folders.mktemp("chaos") / "log") as running:
        yield running
    # Servers of other tests may have some.
    left = shared_memory() - memory
    assert not [name for name in left if not psutil.pid_exists(int(name.split("-")[2]))]


@pytest.fixture(scope="session")
def asked() -> list[Request]:
    return requests(STREAMS)


@pytest.fixture(scope="session")
def undisturbed(server: Server, asked: list[Request]) -> list[Heard]:
    heard = run(server, asked)
    assert [one.problem for one in heard] == [""] * STREAMS
    return heard
