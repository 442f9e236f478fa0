"""Checks a GGUF file before a server is started with it: all that does not need its tensors' values."""

from __future__ import annotations

from shared.gguf.config import config_of
from shared.gguf.file import open_gguf
from shared.gguf.tokenizer import check_tokenizer


def check_gguf(path: str) -> None:
    """Raise GgufError, or OSError, with the reason why the file cannot be served."""
    file = open_gguf(path)
    config_of(file)
    check_tokenizer(file)
