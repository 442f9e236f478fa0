"""One server of the embedded model for all clients, in a network namespace with loopback only where that is allowed.

The clients are in another environment than the server (docs/clients.md): SERVER_PYTHON names the interpreter that has
tokenyard. SERVER_PORT, if set, is the port of one that runs already with the embedded model: it saves the start while
a test is written, and then there is no namespace.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.loopback import leave_the_network
from tests.system.server import Server

SERVER_PYTHON = os.environ.get("SERVER_PYTHON", str(Path(sys.prefix).parent / "bin" / "python"))

# A tiny model computes faster on one thread than on two that wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

# What clients look up or report elsewhere when nobody forbids it.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
os.environ["LANGSMITH_TRACING"] = "false"


def pytest_configure() -> None:
    if "SERVER_PORT" in os.environ:
        return
    try:
        leave_the_network()
    except OSError as error:
        print(f"no network namespace ({error}): clients may reach the network, and command lines are skipped")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if "SERVER_PORT" in os.environ:
        yield Server(None, [], Path(os.devnull), port=int(os.environ["SERVER_PORT"]))
        return
    with Server(None, [], tmp_path_factory.mktemp("server") / "log", python=SERVER_PYTHON) as running:
        yield running
