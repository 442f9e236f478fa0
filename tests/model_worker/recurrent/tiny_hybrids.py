"""Tiny models with recurrent layers and attention, with random weights: one config of each served architecture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.model_worker.tiny_models import VOCAB, tiny_model

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_LINEAR = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
_CONV = ["conv", "full_attention", "conv", "conv"]
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": _LINEAR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
# Prompts are longer than the pieces in which a Mamba computes them.
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}

HYBRIDS: Mapping[str, dict[str, Any]] = {
    "lfm2": {**_COMMON, "layer_types": _CONV, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**_COMMON, **_MOE, "layer_types": _CONV, "num_dense_layers": 1},
    "qwen3_next": {**_COMMON, **_DELTA, **_MOE},
    "qwen3_5_text": {**_COMMON, **_DELTA},
    "qwen3_5_moe_text": {**_COMMON, **_DELTA, **_MOE},
    "granitemoehybrid": {
        **_COMMON,
        **_MAMBA,
        "layer_types": _LINEAR,
        "num_local_experts": 4,
        "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "falcon_h1": {
        **_COMMON,
        **_MAMBA,
        "mamba_d_ssm": 96,
        "num_hidden_layers": 2,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 1.0],
        "ssm_in_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
    },
    "nemotron_h": {
        **_COMMON,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
        "head_dim": 12,
        "ssm_state_size": 8,
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "bamba": {**_COMMON, **_MAMBA, "attn_layer_indices": [1]},
    "olmo_hybrid": {
        **_COMMON,
        "layer_types": _LINEAR,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
    },
    "kimi_linear": {
        **_COMMON,
        "num_key_value_heads": 4,
        "layer_types": _LINEAR,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "moe_intermediate_size": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
}


def tiny_hybrid(arch: str, directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """As `tiny_model`, for an architecture with recurrent layers."""
    return tiny_model(arch, directory, seed, **{**HYBRIDS[arch], **overrides})
