"""Tiny models of many architectures with random weights, for tests that need real ones.

The weights are drawn wide: with transformers' own narrow initialisation greedy text repeats one token whatever the
attention does, and a test of it would pass for a broken one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shared.weights_file import stamp_of

VOCAB = 193

_ROTARY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

# model_type and the config values that give each its character. Windows are shorter than most test prompts.
_CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": {**_ROTARY, "head_dim": 16},
    "qwen2": {
        **_ROTARY,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "qwen3": {**_ROTARY, "head_dim": 32, "num_key_value_heads": 1},
    "mistral": {**_ROTARY, "sliding_window": 8},
    "gemma2": {
        **_ROTARY,
        "head_dim": 24,
        "tie_word_embeddings": False,
        "query_pre_attn_scalar": 10,
        "sliding_window": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 30.0,
        "layer_types": _ALTERNATING,
    },
    "gemma3_text": {
        **_ROTARY,
        "head_dim": 24,
        "tie_word_embeddings": False,
        "sliding_window": 5,
        "layer_types": _ALTERNATING,
    },
    "phi3": {**_ROTARY, "num_key_value_heads": 4, "sliding_window": 12, "pad_token_id": 0},
    "gpt2": {
        "vocab_size": VOCAB,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 3,
        "n_positions": 512,
        "tie_word_embeddings": False,
    },
    "gptj": {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 3, "n_positions": 512, "rotary_dim": 8},
    "codegen": {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "rotary_dim": 8},
    "mixtral": {**_ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt_oss": {
        **_ROTARY,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": _ALTERNATING,
    },
    "qwen3_moe": {**_ROTARY, **_MOE, "head_dim": 16, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "olmo2": _ROTARY,
    "granite": {**_ROTARY, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "cohere2": {**_ROTARY, "sliding_window": 8, "layer_types": _ALTERNATING},
    "stablelm": {**_ROTARY, "partial_rotary_factor": 0.5},
    "starcoder2": {**_ROTARY, "sliding_window": 16},
    "glm4": {**_ROTARY, "head_dim": 16, "pad_token_id": 0},
    "gpt_neox": {**_ROTARY, "num_key_value_heads": 4},
    "opt": {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "ffn_dim": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "word_embed_proj_dim": 48,
        "tie_word_embeddings": False,
    },
}

ARCHITECTURES: tuple[str, ...] = tuple(_CONFIGS)

_made: dict[tuple[Any, ...], Path] = {}
# The stamp of each folder that several tests read.
_stamps: dict[Path, str] = {}


def tiny_model(arch: str, directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """A directory with a float32 model of `arch`, made once per session. `overrides` replace config values.

    All tests of a run share it and only read it; AssertionError if one has changed it.
    """
    key = (arch, seed, repr(sorted(overrides.items())))
    if key not in _made:
        path = own_tiny_model(arch, directory / f"{arch}-{seed}-{len(_made)}", seed, **overrides)
        _made[key] = path
        _stamps[path] = stamp_of(str(path), [])
    path = _made[key]
    assert stamp_of(str(path), []) == _stamps[path], f"a test has changed {path}, which others read: use own_tiny_model"
    return path


def own_tiny_model(arch: str, path: Path, seed: int = 0, **overrides: Any) -> Path:
    """Make the same model at `path`, for one test alone, which may change it."""
    config = {"bos_token_id": 1, "eos_token_id": 2, **_CONFIGS.get(arch, {}), **overrides}
    return save_random_model(arch, path, seed, config)


def save_random_model(arch: str, path: Path, seed: int, config: dict[str, Any]) -> Path:
    """Save a model of `config` with wide random weights to `path`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **config), dtype=torch.float32)
        widen(model)
    model.generation_config.eos_token_id = config["eos_token_id"]
    model.save_pretrained(path)
    return path


def widen(model: PreTrainedModel) -> None:
    """Matrices that keep a vector's size, uneven norms and biases, and embeddings that do not predict themselves."""
    embedding_scale = 0.1 if model.config.tie_word_embeddings else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() == 1:
                parameter.add_(0.2 * noise)
            else:
                is_embedding = any(part in name for part in ("emb", "wte", "wpe"))
                parameter.copy_(noise * (embedding_scale if is_embedding else 2.0 / parameter.shape[-1] ** 0.5))
