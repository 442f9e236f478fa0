"""What runs in processes of its own begins with the first test of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.model_worker.apart import Apart


@pytest.fixture(scope="session", autouse=True)
def apart(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    """The runs of tests/model_worker/apart.py that this session's tests ask for, which are none in most sessions."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    names = [str(item.callspec.params["apart_run"]) for item in items if "apart_run" in item.callspec.params]
    runs = Apart(names, tmp_path_factory.mktemp("apart"))
    yield runs
    runs.close()
