"""A tiny model with a tokenizer, and one real server of it for all tests that do no harm to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.pooling_models import make_embedder
from tests.system.served_model import make_model
from tests.system.server import Server, free_port


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def target(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that strange requests are sent to: what is asked of it ends soon, whatever it is."""
    log = tmp_path_factory.mktemp("target") / "log"
    flags = ["--dtype", "float32", "--max-model-len", "96", "--max-running", "16", "--max-queued", "64"]
    with Server(model, [*flags, "--kv-memory", "2MB", "--api-servers", "2", "--hidden-states"], log) as running:
        yield running


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ["--dtype", "float32", "--max-batch-tokens", "48", "--max-running", "16", "--kv-memory", "2MB"]
    more = ["--fetch-hosts", "127.0.0.1", "--ollama-port", str(free_port())]
    with Server(model, [*flags, *more], log) as running:
        yield running


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("pooling") / "tiny-embedder")


@pytest.fixture(scope="session")
def embedding(embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model that pools."""
    flags = ["--dtype", "float32", "--max-batch-tokens", "256", "--api-servers", "2"]
    with Server(embedder, flags, tmp_path_factory.mktemp("embedding") / "log") as running:
        yield running
