"""Recorded steps of many architectures wait for nothing, copy nothing from the host, and launch so many kernels.

On fake CUDA tensors (fake_gpu.py): an operation that would need a value from the device raises an error.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from model_worker.backends.fused_layers import FusedLayers
from model_worker.cuda.encoded_experts import PROJECTIONS, put_stacks, stack_of
from model_worker.cuda.graphs import DecodeBuffers
from model_worker.cuda.grouped_linear import TABLE
from model_worker.cuda.mixed_graphs import MixedBuffers
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner
from tests.model_worker.cuda.fake_gpu import DEVICE, fake_gpu, moved
from tests.model_worker.cuda.in_four_bits import grouped_layer, in_four_bits
from tests.model_worker.cuda.interpreter import need_triton
from tests.model_worker.cuda.launches import Launches, counted_launches
from tests.model_worker.recurrent.tiny_hybrids import HYBRIDS, tiny_hybrid
from tests.model_worker.tiny_models import VOCAB, tiny_model

need_triton()

LAYERS = 2
ROWS = 8
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT: dict[str, Any] = {
    **_SMALL,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# Of the architectures that tiny_models.py has no values for.
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma": {**_SMALL, "head_dim": 16},
    "phi": _SMALL,
    "cohere": _SMALL,
    "smollm3": {**_SMALL, "no_rope_layers": [1, 0]},
    "ernie4_5": {**_SMALL, "head_dim": 16},
    "seed_oss": {**_SMALL, "head_dim": 16},
    "ministral3": {**_SMALL, "head_dim": 16},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "olmoe": _EXPERTS,
    "granitemoe": {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**_LATENT, "topk_method": "greedy"},
    "deepseek_v3": _LATENT,
}
# Models with fused layers, and launches of a decode step through two layers.
FUSED = {
    "llama": 31,
    "qwen2": 31,
    "qwen3": 31,
    "mistral": 31,
    "phi3": 31,
    "gemma": 33,
    "gemma2": 36,
    "gemma3_text": 42,
}
# The same of models that keep transformers' modules, whose norms and gates are not replaced here.
MODULES = {
    "gpt2": 42,
    "gptj": 76,
    "codegen": 75,
    "mixtral": 136,
    "gpt_oss": 153,
    "qwen3_moe": 168,
    "olmo2": 132,
    "granite": 104,
    "cohere2": 89,
    "stablelm": 67,
    "starcoder2": 59,
    "glm4": 136,
    "gpt_neox": 59,
    "opt": 36,
    "phi": 75,
    "cohere": 103,
    "smollm3": 88,
    "ernie4_5": 112,
    "seed_oss": 98,
    "ministral3": 114,
    "qwen2_moe": 150,
    "olmoe": 164,
    "granitemoe": 138,
    "deepseek_v2": 133,
    "deepseek_v3": 166,
}
# The same of models with recurrent layers: decode steps alone are recorded, through all of their few layers.
RECURRENT = {
    "lfm2": 177,
    "lfm2_moe": 240,
    "qwen3_next": 493,
    "qwen3_5_text": 371,
    "qwen3_5_moe_text": 483,
    "granitemoehybrid": 352,
    "falcon_h1": 186,
    "nemotron_h": 199,
    "bamba": 256,
    "olmo_hybrid": 345,
    "kimi_linear": 414,
}
MOST_OF_A_FUSED_LAYER = 9


def load(family: str, folder: Path, layers: int = LAYERS, **overrides: Any) -> LoadedModel:
    """Load a model, with fused layers where its form has them."""
    own = dict(CONFIGS.get(family, {})) | overrides
    own["n_layer" if family in ("gpt2", "gptj", "codegen") else "num_hidden_layers"] = layers
    if family in ("gemma2", "gemma3_text", "qwen2", "gpt_oss", "cohere2"):
        own["layer_types"] = ["sliding_attention", "full_attention", "full_attention"][:layers]
    path = tiny_model(family, folder, **own)
    loaded = load_model(path, "float32", "cpu", lambda *_: None, has_kernels=lambda *_: False)
    loaded = replace(loaded, attention_name="triton", has_kernels=True)
    return replace(loaded, layers=FusedLayers(loaded)) if family in FUSED else loaded


def load_in_four_bits(folder: Path, layers: int = LAYERS) -> LoadedModel:
    """Load a model with fused layers whose linear modules have weights of four bits."""
    loaded = load("llama", folder, layers, hidden_size=64)
    for block in (module for layer in loaded.model.get_decoder().layers for module in (layer.self_attn, layer.mlp)):
        for name, linear in list(block.named_children()):
            if isinstance(linear, nn.Linear):
                setattr(block, name, in_four_bits(linear))
    return replace(loaded, layers=FusedLayers(replace(loaded, layers=None)))


def load_in_mxfp4(folder: Path) -> LoadedModel:
    """Load gpt-oss, and give it random experts that are multiplied in MXFP4."""
    loaded = load("gpt_oss", folder, hidden_size=64, intermediate_size=64)
    for layer in loaded.model.get_decoder().layers:
        shapes = [getattr(layer.mlp.experts, name).shape for name in PROJECTIONS]
        layers = [[[grouped_layer(outputs, inputs, 32, TABLE)] for _ in range(n)] for n, inputs, outputs in shapes]
        put_stacks(layer.mlp.experts, [stack_of(experts, torch.float32) for experts in layers])
    return loaded


def launched(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> tuple[Launches, Launches]:
    """Launch a decode step and one with prompts, as they are recorded."""
    with fake_gpu(monkeypatch):
        backend: Any = ModelRunner(moved(loaded, torch.bfloat16), 8, 16).backend
        places = 4, 16, 8, DEVICE
        found = []
        for batch in (DecodeBuffers(ROWS, *places).batch(ROWS), MixedBuffers(64, ROWS, *places).batch(64)):
            with counted_launches(monkeypatch, run=False) as launches:
                logits = backend._forward(batch)
            assert (logits.shape, logits.device) == ((ROWS, loaded.vocab_size), DEVICE)
            found.append(launches)
    return found[0], found[1]


@pytest.mark.parametrize(("family", "most"), [*FUSED.items(), *MODULES.items()])
def test_a_recorded_step_waits_for_nothing(
    family: str, most: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, mixed = launched(load(family, tmp_path_factory.getbasetemp()), monkeypatch)
    for launches in (decode, mixed):
        assert not launches.wide_doubles
        assert not launches.from_host
    assert len(decode.names) <= most, Counter(decode.names)
    # The attention of prompts has a launch of its own.
    assert len(mixed.names) <= most + LAYERS, Counter(mixed.names)


@pytest.mark.parametrize(("arch", "most"), RECURRENT.items())
def test_a_recorded_step_with_recurrent_states_waits_for_nothing(
    arch: str, most: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_hybrid(arch, tmp_path_factory.getbasetemp())
    loaded = load_model(path, "float32", "cpu", lambda *_: None, has_kernels=lambda *_: False)
    loaded = replace(loaded, attention_name="triton", has_kernels=True)
    with fake_gpu(monkeypatch):
        backend: Any = ModelRunner(moved(loaded, torch.bfloat16), 8, 16, max_rows=ROWS).backend
        batch = DecodeBuffers(ROWS, 4, 16, 8, DEVICE, spare_row=ROWS).batch(ROWS)
        with counted_launches(monkeypatch, run=False) as launches:
            logits = backend._forward(batch)
        assert (logits.shape, logits.device) == ((ROWS, loaded.vocab_size), DEVICE)
    assert not launches.wide_doubles
    assert not launches.from_host
    assert len(launches.names) <= most, Counter(launches.names)


def test_every_served_hybrid_is_recorded() -> None:
    assert set(RECURRENT) == set(HYBRIDS)


@pytest.mark.parametrize("family", FUSED)
def test_launches_of_a_fused_layer(
    family: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a decode step: those of a model of three layers that one of two has not. Attention in pieces has one more."""
    two, three = (launched(load(family, tmp_path_factory.getbasetemp(), n), monkeypatch)[0] for n in (2, 3))
    of_layer = Counter(three.names) - Counter(two.names)
    assert of_layer.total() <= MOST_OF_A_FUSED_LAYER, of_layer
    assert of_layer["aten::mm"] + of_layer["aten::addmm"] == 4


def test_weights_of_four_bits_are_multiplied_in_as_many_launches(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, three = (launched(load_in_four_bits(tmp_path_factory.getbasetemp(), n), monkeypatch) for n in (2, 3))
    for launches in (*two, *three):
        assert not launches.wide_doubles
        assert not launches.from_host
    of_layer = Counter(three[0].names) - Counter(two[0].names)
    assert of_layer.total() <= MOST_OF_A_FUSED_LAYER, of_layer
    assert of_layer["grouped_kernel"] == 4
    assert len(two[0].names) <= FUSED["llama"]


def test_experts_of_gpt_oss_in_four_bits_wait_for_nothing(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What orders pairs of tokens and experts costs a launch more a layer than what torch does."""
    decode, mixed = launched(load_in_mxfp4(tmp_path_factory.getbasetemp()), monkeypatch)
    for launches in (decode, mixed):
        assert not launches.wide_doubles
        assert not launches.from_host
        assert launches.names.count("grouped_experts_kernel") == 2 * LAYERS
    assert len(decode.names) <= MODULES["gpt_oss"] + LAYERS


def test_what_cannot_be_recorded_is_found_out(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PhiMoE's rotary module makes its frequencies on the host in each pass."""
    decode, _ = launched(load("phimoe", tmp_path_factory.getbasetemp()), monkeypatch)
    assert decode.from_host == ["aten::_to_copy"]
    with fake_gpu(monkeypatch), pytest.raises(DataDependentOutputException):
        torch.zeros(3, device=DEVICE).tolist()
