"""Adapters that PEFT saves give the logits and the tokens of PEFT's own forward pass, and of its merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from model_worker.batch import ForwardBatch
from model_worker.loading.load import load_model
from model_worker.runner import ModelRunner
from tests.model_worker.adapters.made import LINEARS
from tests.model_worker.tiny_models import VOCAB, tiny_model

peft: Any = pytest.importorskip("peft")

BLOCK = 16
NEW_TOKENS = 8

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "patterns": {"use_rslora": True, "rank_pattern": {r"(layers|h)\.0\..*": 9}, "alpha_pattern": {"[qu].*_proj": 5}},
    "DoRA": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "own bias": {"bias": "all"},
    "modules to save": {"modules_to_save": ["lm_head"]},
}
# Every architecture, and every kind on one of each backend.
CASES = [
    *((arch, "plain") for arch in ("llama", "qwen3", "gemma3_text", "mixtral")),
    *((arch, kind) for arch in ("qwen2", "gpt2") for kind in list(KINDS)[:-1] if (arch, kind) != ("gpt2", "own bias")),
    *((arch, "embeddings") for arch in ("qwen2", "gemma3_text")),
    *((arch, "modules to save") for arch in ("qwen2", "gemma3_text", "gpt2")),
    ("qwen2", "DoRA embeddings"),
    ("mixtral", "experts"),
    *((arch, "tokens") for arch in ("qwen2", "llama", "gemma3_text")),
    ("llama", "tokens of both"),
]


@pytest.mark.parametrize(("arch", "kind"), CASES)
def test_saved_adapters_compute_as_peft_does(arch: str, kind: str, tmp_path_factory: Any, tmp_path: Path) -> None:
    wide = {"hidden_size": 64} if arch == "qwen2" else {}
    path = tiny_model(arch, tmp_path_factory.getbasetemp(), **wide)
    model = saved(arch, path, kind, tmp_path / "adapter")
    loaded = load_model(path, "float32", "cpu", lambda *_: None)
    backend = ModelRunner(loaded, 8, BLOCK).backend
    backend.load_adapter(7, str(tmp_path / "adapter"))
    tokens = np.random.default_rng().integers(3, VOCAB, 30)
    # Some have vectors of their own.
    tokens[3:6] = 5, 9, 17
    chunk = tokens
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            want = model(input_ids=torch.from_numpy(tokens)[None]).logits[0, -len(chunk) :]
        lengths = np.array([len(chunk)]), np.array([len(tokens)])
        batch = ForwardBatch.build(
            chunk, *lengths, np.arange(4)[None], BLOCK, np.arange(len(chunk)), adapters=np.array([7], np.int32)
        )
        got = backend.logits(batch)
        assert (got - want).norm() < 1e-5 * want.norm()
        chunk = want[-1:].argmax(-1).numpy()
        assert got[-1].argmax() == chunk[0]
        tokens = np.concatenate([tokens, chunk])
    merged = model.merge_and_unload()
    with torch.no_grad():
        want = merged(input_ids=torch.from_numpy(tokens[:-1])[None]).logits[0, -1]
    assert (got[-1] - want).norm() < 1e-4 * want.norm()


def saved(arch: str, path: Path, kind: str, folder: Path) -> Any:
    """Save an adapter with random weights. Returns PEFT's model, which computes it."""
    values = dict(KINDS.get(kind, {}))
    targets = list(LINEARS.get(arch, ()))
    if kind == "lora_bias" and arch == "qwen2":
        # PEFT merges it into modules with a bias only.
        targets = ["q_proj", "k_proj", "v_proj"]
    if kind == "embeddings":
        targets = ["q_proj", "embed_tokens", "lm_head"]
    if kind == "experts":
        values["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    if kind == "tokens":
        values["trainable_token_indices"] = [5, 9, 17, 30]
    if kind == "tokens of both":
        values["trainable_token_indices"] = {"embed_tokens": [5, 9, 17], "lm_head": [7, 9]}
    if kind == "DoRA embeddings":
        targets = ["q_proj", "embed_tokens"]
        values["use_dora"] = True
    if kind == "modules to save" and arch != "gpt2":
        values["modules_to_save"] = ["embed_tokens", "lm_head"]
    base: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=targets or "all-linear",
        init_lora_weights=not values.get("lora_bias"),
        **values,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = peft.get_peft_model(base, config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name and "magnitude" not in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
                elif "modules_to_save" in name or "trainable_tokens_delta" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif "magnitude" in name or (kind == "own bias" and name.endswith("_proj.base_layer.bias")):
                    parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model
