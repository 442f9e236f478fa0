"""Quantized checkpoints as a GPU's worker loads them, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from model_worker.attention import PAGED_ATTENTION
from model_worker.cuda import experts_trial, fp8_blocks, grouped_trial
from model_worker.cuda.fp8_blocks import SIDE
from model_worker.loading.checkpoint import read_config
from model_worker.loading.prepare import prepare
from model_worker.loading.quantized.scheme import scheme_of
from model_worker.loading.stored import open_stored
from model_worker.loading.weights import load_quantized
from model_worker.model import LoadedModel
from tests.model_worker.loading.quantized_checkpoints import quantize_experts
from tests.model_worker.tiny_models import tiny_model


def shorten_trials(patch: pytest.MonkeyPatch) -> None:
    """Try few tokens: interpreted kernels are slow."""
    patch.setattr(experts_trial, "_TRIAL_TOKENS", (9,))
    patch.setattr(grouped_trial, "_TRIAL_TOKENS", (1, 17))
    patch.setattr(fp8_blocks, "_TRIAL_TOKENS", (1, 17))
    patch.setattr(fp8_blocks, "_TRIAL_INPUTS", 2 * SIDE + 16)


def loaded(path: Path, attention: str = "eager") -> Any:
    """Load a model in float32, whose weights stay encoded if this machine's products with them are right."""
    config = read_config(path)
    scheme, device = scheme_of(path, config), torch.device("cpu")
    kinds = {"attn_implementation": attention}, False, True
    stored = open_stored(path)
    with pytest.MonkeyPatch.context() as patch:
        shorten_trials(patch)
        return load_quantized(
            AutoModelForCausalLM, stored, scheme, config, config.model_type, torch.float32, device, *kinds
        ).eval()


def load_gpt_oss(folder: Path, path: Path) -> LoadedModel:
    """Load a model whose experts stay in MXFP4, written to `path`, with a plain one in `exact`."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, **layers}
    quantize_experts(tiny_model("gpt_oss", folder, **sizes), path)
    model = loaded(path, PAGED_ATTENTION)
    served = prepare(model, torch.device("cpu"), "none", lambda *_: None, has_kernels=lambda *_: False)
    return replace(served, attention_name="triton", has_kernels=True)
