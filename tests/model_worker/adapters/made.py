"""Adapters with random weights, in directories as PEFT writes them, and models into which they are merged.

The merged weights come from the formulas in PEFT's papers, and not from the code under test.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

# Target modules that every linear layer of the tiny models of an architecture has.
LINEARS = {
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "mixtral": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Made:
    """An adapter in a directory, and the model that it makes of the base model."""

    folder: Path
    merged: Any


@dataclass
class Recipe:
    """What is adapted, and how. `config` are further keys of the config."""

    rank: int = 4
    targets: tuple[str, ...] = PROJECTIONS
    dora: bool = False
    lora_bias: bool = False
    own_bias: bool = False
    config: dict[str, Any] = field(default_factory=dict)


def make(base: Path, folder: Path, recipe: Recipe, seed: int, dtype: torch.dtype = torch.float32) -> Made:
    """Write an adapter for the model in `base`, with tensors of this type."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": recipe.rank,
        "lora_alpha": 6,
        "init_lora_weights": True,
        "use_dora": recipe.dora,
        "lora_bias": recipe.lora_bias,
        "bias": "lora_only" if recipe.own_bias else "none",
        "target_modules": list(recipe.targets),
        **recipe.config,
    }
    random = torch.Generator().manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tensors: dict[str, Tensor] = {}

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=random) * scale).to(dtype)

    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in recipe.targets:
            continue
        prefix = f"base_model.model.{name}"
        weight = module.weight.data
        is_conv = isinstance(module, Conv1D)
        if is_conv:
            weight = weight.T
        rank = _of_pattern(config.get("rank_pattern", {}), name, recipe.rank)
        alpha = _of_pattern(config.get("alpha_pattern", {}), name, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        if isinstance(module, torch.nn.Embedding):
            a = tensors[f"{prefix}.lora_embedding_A"] = drawn(rank, weight.shape[0])
            b = tensors[f"{prefix}.lora_embedding_B"] = drawn(weight.shape[1], rank, scale=0.3)
            module.weight.data = weight + scale * (b.float() @ a.float()).T
            continue
        a = tensors[f"{prefix}.lora_A.weight"] = drawn(rank, weight.shape[1], scale=weight.shape[1] ** -0.5)
        b = tensors[f"{prefix}.lora_B.weight"] = drawn(weight.shape[0], rank, scale=0.2)
        merged = weight + scale * (b.float() @ a.float())
        if recipe.dora:
            magnitude = weight.norm(dim=1) * (1 + 0.3 * drawn(len(weight)).float())
            tensors[f"{prefix}.lora_magnitude_vector"] = magnitude.to(dtype)
            merged = merged * (magnitude.to(dtype).float() / merged.norm(dim=1))[:, None]
        module.weight.data = (merged.T if is_conv else merged).contiguous()
        if recipe.lora_bias:
            added = tensors[f"{prefix}.lora_B.bias"] = drawn(len(weight))
            own = torch.zeros(len(weight)) if module.bias is None else module.bias.data
            module.bias = torch.nn.Parameter(own + scale * added.float())
        if recipe.own_bias and module.bias is not None:
            tensors[f"{prefix}.base_layer.bias"] = drawn(len(weight))
            module.bias.data = tensors[f"{prefix}.base_layer.bias"].float()
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return Made(folder, model)


def _of_pattern(pattern: dict[str, int], name: str, default: int) -> int:
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", name)), default)
