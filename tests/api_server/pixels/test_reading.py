"""Descriptions as the tokens of a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from api_server.pixels.reading import prompt_ids
from tests.model_worker.pixels.tiny_tokenizer import second_tokenizer, tokenizer_of


def test_an_empty_description_has_a_token_also_without_marks() -> None:
    files: Any = SimpleNamespace(longest_prompt=77)
    for made in (tokenizer_of(), second_tokenizer()):
        tokenizer: Any = SimpleNamespace(backend=made.backend_tokenizer)
        assert prompt_ids(files, tokenizer, "", "prompt")
