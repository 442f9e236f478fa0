"""Programs that leave a server running share the one of the embedded model; those that need two share a pair."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.components.pair import Pair, read_streams
from tests.components.stand_in import standing_in
from tests.system.server import Server


@pytest.fixture(scope="session")
def server(embedded: Server) -> Server:
    return embedded


@pytest.fixture
def busy() -> Iterator[int]:
    """The port of a server whose queue is full, in SGLang's dialect; `/ready` says nothing of that."""
    with standing_in(503) as stand_in:
        yield stand_in.port


@pytest.fixture
def full() -> Iterator[int]:
    """The port of one in the other dialects, which say when to come again."""
    with standing_in(429, retry_after="7") as stand_in:
        yield stand_in.port


@pytest.fixture(scope="package")
def started_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two servers with the settings that a server has by default."""
    folder = tmp_path_factory.mktemp("pair")
    pair = Pair({name: Server(None, [], folder / f"{name}.log") for name in ("yard1", "yard2")})
    try:
        pair.start()
        streams = read_streams(pair.servers["yard1"].url, "undisturbed")
        pair.undisturbed = [stream.text for stream in streams]
        yield pair
    finally:
        pair.stop()


@pytest.fixture
def pair(started_pair: Pair) -> Pair:
    """Both run, whatever the test before has left."""
    started_pair.start()
    return started_pair
