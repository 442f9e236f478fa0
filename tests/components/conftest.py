"""Programs that leave a server running share the one of the embedded model."""

from __future__ import annotations

import pytest

from tests.system.server import Server


@pytest.fixture(scope="session")
def server(embedded: Server) -> Server:
    return embedded
