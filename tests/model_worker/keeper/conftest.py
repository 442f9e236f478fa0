from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.model_worker.keeper.running import Running, running


@pytest.fixture
def keeper() -> Iterator[Running]:
    with running() as one:
        yield one
