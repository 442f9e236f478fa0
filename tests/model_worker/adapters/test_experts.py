"""Adapters of single experts, as they are named since before transformers joined the experts of a layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from model_worker.adapters.refusal import AdapterRefused
from model_worker.batch import ForwardBatch
from model_worker.loading.load import load_model
from model_worker.runner import ModelRunner
from tests.model_worker.tiny_models import VOCAB, tiny_model

BLOCK = 16
ALPHA = 6
RANK = 3


def adapter(
    model: Any, folder: Path, pairs: dict[str, tuple[int, int]], count: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Write an adapter with random weights for the linear modules of `count` experts of each layer, by their names and
    shapes (inputs, outputs)."""
    tensors = {}
    for layer in range(len(model.model.layers)):
        for expert in range(count):
            for name, (inputs, outputs) in pairs.items():
                path = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
                tensors[path] = torch.randn(RANK, inputs) * inputs**-0.5, torch.randn(outputs, RANK) * 0.3
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "init_lora_weights": True}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    parts = {
        f"base_model.model.{path}.lora_{'AB'[i]}.weight": pair[i] for path, pair in tensors.items() for i in (0, 1)
    }
    save_file(parts, folder / "adapter_model.safetensors")
    return tensors


def test_single_experts_compute_as_merged_weights(tmp_path: Path) -> None:
    path = tiny_model("mixtral", tmp_path, seed=1)
    merged: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    experts = merged.model.layers[0].mlp.experts
    inner, hidden = experts.intermediate_dim, experts.hidden_dim
    shapes = {"w1": (hidden, inner), "w3": (hidden, inner), "w2": (inner, hidden)}
    # The last expert stays as it is.
    for name, (a, b) in adapter(merged, tmp_path / "adapter", shapes, experts.num_experts - 1).items():
        _, _, layer, _, _, expert, linear = name.split(".")
        into = merged.model.layers[int(layer)].mlp.experts
        weight = into.down_proj if linear == "w2" else into.gate_up_proj
        rows = slice(inner, None) if linear == "w3" else slice(0, inner if linear == "w1" else hidden)
        weight.data[int(expert), rows] += ALPHA / RANK * (b @ a)
    loaded = load_model(path, "float32", "cpu", lambda *_: None)
    backend = ModelRunner(loaded, 8, BLOCK).backend
    tokens = np.random.default_rng().integers(3, VOCAB, 30)
    count = np.array([len(tokens)])

    def logits(handle: int) -> torch.Tensor:
        every = np.arange(len(tokens))
        handles = np.array([handle], np.int32)
        return backend.logits(
            ForwardBatch.build(tokens, count, count, np.arange(4)[None], BLOCK, every, adapters=handles)
        )

    plain = logits(0)
    backend.load_adapter(5, str(tmp_path / "adapter"))
    with torch.no_grad():
        want = merged(input_ids=torch.from_numpy(tokens)[None]).logits[0]
    got = logits(5)
    assert (got - want).norm() < 1e-5 * want.norm()
    assert (got - plain).norm() > 1e-2 * want.norm()
    assert torch.equal(logits(0), plain)
    backend.drop_adapter(5)
    assert torch.equal(logits(0), plain)


@pytest.mark.parametrize(
    ("pairs", "count", "reason"),
    [
        ({"w1": (7, 5)}, 1, "belongs to another model"),
        ({"w4": (32, 64)}, 1, "no linear module of an expert that is known"),
        ({"w1": (32, 64)}, 99, "more experts than the model has"),
    ],
)
def test_experts_that_do_not_fit_are_refused(
    pairs: dict[str, tuple[int, int]], count: int, reason: str, tmp_path: Path
) -> None:
    path = tiny_model("mixtral", tmp_path, seed=1)
    loaded = load_model(path, "float32", "cpu", lambda *_: None)
    adapter(loaded.model, tmp_path / "adapter", pairs, count)
    with pytest.raises(AdapterRefused, match=reason):
        ModelRunner(loaded, 8, BLOCK).backend.load_adapter(1, str(tmp_path / "adapter"))
