"""The adapter that is tried before K and V are laid out: its modules, and those that no adapter may name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PhimoeConfig
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig

from model_worker.adapters.blank import blank_adapter
from model_worker.adapters.fitting import read_adapter
from model_worker.adapters.refusal import AdapterRefused
from tests.model_worker.adapters.made import Recipe, make

CPU = torch.device("cpu")
TOKENS = 5
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(("config", "linears"), [(LlamaConfig, 8), (PhimoeConfig, 5), (Llama4TextConfig, 8)])
def test_its_modules_give_one_tensor_with_a_row_for_each_token(config: Any, linears: int) -> None:
    """Those of routers do not."""
    model = AutoModelForCausalLM.from_config(config(**SIZES)).eval()
    adapter = blank_adapter(model, 2, CPU, torch.float32)
    given: dict[nn.Module, Tensor] = {}
    for module in adapter.linears:
        module.register_forward_hook(lambda module, _, output: given.update({module: output}))
    model(input_ids=torch.arange(TOKENS)[None])
    assert len(given) == len(adapter.linears) == linears
    assert adapter.embedding is not None
    assert (len(adapter.embedding.a), len(adapter.embedding.b)) == (SIZES["vocab_size"], SIZES["hidden_size"])
    for module, linear in adapter.linears.items():
        assert given[module].numel() == TOKENS * len(linear.b)


def test_an_adapter_of_a_router_is_refused(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_config(PhimoeConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path / "model")
    folder = make(tmp_path / "model", tmp_path / "adapter", Recipe(targets=("router",)), 1).folder
    with pytest.raises(AdapterRefused, match=r"router is a PhimoeTopKRouter, and only linear modules that give their"):
        read_adapter(folder, model, 1 << 20)
