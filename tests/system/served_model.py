"""The tiny model that system tests serve."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from tests.api_server.conftest import CHATML, byte_level_backend
from tests.model_worker.tiny_models import tiny_model


def make_model(folder: Path) -> Path:
    """Random weights that never end by themselves: the EOS id is one that no test waits for."""
    folder.mkdir(exist_ok=True)
    backend = byte_level_backend()
    size = backend.get_vocab_size()
    path = tiny_model("llama", folder, vocab_size=size, eos_token_id=2, max_position_embeddings=4096)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHATML)
    tokenizer.save_pretrained(path)
    return path
