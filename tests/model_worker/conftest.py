"""What runs in processes of its own begins with the first test of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.model_worker.apart import Apart


@pytest.fixture(scope="session")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    runs = Apart(tmp_path_factory.mktemp("apart"))
    yield runs
    runs.close()


@pytest.fixture(scope="session", autouse=True)
def begun_apart(request: pytest.FixtureRequest) -> None:
    if any("apart" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("apart")
