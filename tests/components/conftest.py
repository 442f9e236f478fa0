"""One server of the embedded model for all programs that leave it running."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.server import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(None, [], tmp_path_factory.mktemp("server") / "log") as running:
        yield running
