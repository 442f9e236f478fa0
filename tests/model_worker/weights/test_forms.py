"""Other weights in every form in which they lie in memory: bits are those of a fresh start with the new files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from interfaces import TensorSpec
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner
from model_worker.weights.groups import _messages
from tests.gguf_models import random_model, write_model
from tests.model_worker.loading.quantized_checkpoints import FORMATS, quantize_checkpoint
from tests.model_worker.tiny_models import tiny_model
from tests.model_worker.weights.test_serving import MAX_MODEL_LEN, TinyWorker

# Projections that fill whole panels and groups.
SIZE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 1}
GGUF_SIZE: dict[str, Any] = {
    "vocab_size": 193,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


def checkpoint(form: str, folder: Path, seed: int) -> Path:
    """Write a model in one of the forms."""
    if form in ("Q8_0", "Q4_0"):
        path = folder / f"{seed}.gguf"
        write_model(path, random_model("llama", GGUF_SIZE, seed), "llama", form)
        return path
    plain = tiny_model("llama", folder / f"plain {seed}", seed=seed, **SIZE)
    return quantize_checkpoint(plain, folder / str(seed), FORMATS[form]) if form in FORMATS else plain


# The stack of weights in codes is compiled.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "dtype", "quantization"),
    [
        ("plain", "bfloat16", "none"),
        ("plain", "float32", "int8"),
        ("plain", "bfloat16", "int8"),
        ("Q8_0", "float32", "none"),
        ("Q4_0", "bfloat16", "none"),
        ("gptq", "float32", "int8"),
        ("awq", "bfloat16", "none"),
    ],
)
def test_other_weights_are_those_of_a_fresh_start(form: str, dtype: str, quantization: str, tmp_path: Path) -> None:
    def load(source: str, overlays: list[Path]) -> LoadedModel:
        return load_model(
            source,
            dtype,
            "cpu",
            lambda *_: None,
            max_model_len=MAX_MODEL_LEN,
            quantization=quantization,
            has_kernels=lambda *_: True,
            overlays=overlays,
        )

    first, second = (checkpoint(form, tmp_path, seed) for seed in (1, 2))
    worker = TinyWorker(first, load)
    own = worker.logits()
    fresh = ModelRunner(load(str(second), []), 8)
    expected = fresh.backend.logits(fresh._first_tokens(20))
    assert not torch.equal(own, expected)
    worker.change(1, str(second))
    assert torch.equal(worker.logits(), expected)
    worker.change(2, str(first))
    assert torch.equal(worker.logits(), own)


def test_packed_messages_end_where_a_trainer_ends_them() -> None:
    """As vLLM's trainers do: with the tensor that exceeds the bound."""
    specs = [TensorSpec(str(i), "float32", [length]) for i, length in enumerate([2, 2, 3, 9, 1, 0, 1])]
    found = [[int(spec.name) for spec in message] for message in _messages(specs, 16)]
    assert found == [[0, 1, 2], [3], [4, 5, 6]]
    assert [len(message) for message in _messages(specs, 0)] == [1] * 7
    assert list(_messages([], 16)) == []
