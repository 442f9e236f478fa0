"""A tiny model with a tokenizer, and one real server of it for all tests that do no harm to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.api_server.conftest import CHATML, byte_level_backend
from tests.model_worker.tiny_models import tiny_model
from tests.system.server import Server

VOCAB = 440


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights that never end by themselves: the EOS id is one that no test waits for."""
    backend = byte_level_backend()
    size = backend.get_vocab_size()
    path = tiny_model(
        "llama", tmp_path_factory.mktemp("served"), vocab_size=size, eos_token_id=2, max_position_embeddings=4096
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHATML)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ["--dtype", "float32", "--max-batch-tokens", "48", "--max-running", "16", "--kv-memory", "2MB"]
    with Server(model, flags, log) as running:
        yield running
