"""The tiny model that system tests serve."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from tests.api_server.conftest import CHATML, byte_level_backend
from tests.model_worker.tiny_models import own_tiny_model


def make_model(folder: Path) -> Path:
    """Random weights that end only where a grammar leaves no other choice."""
    backend = byte_level_backend()
    size = backend.get_vocab_size()
    path = own_tiny_model("llama", folder, vocab_size=size, eos_token_id=2, max_position_embeddings=4096)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHATML)
    tokenizer.save_pretrained(path)
    _never_end(path, end=2)
    return path


def _never_end(path: Path, end: int) -> None:
    """Make the logit of `end` low after every text.

    One channel of the residual stream is the same for every token and no layer writes to it; the head of `end` reads
    it with a large negative weight and nobody else does.
    """
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("embed_tokens.weight"):
            weight[:, 0] = weight.std() * 2
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0
        elif name == "lm_head.weight":
            weight[:, 0] = 0
            weight[end, 0] = -80 * weight.norm(dim=1).mean()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
