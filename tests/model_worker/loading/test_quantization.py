"""int8 models, fused or not, give the logits of the naive reference; what cannot be quantized is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2Model

from model_worker.batch import ForwardBatch
from model_worker.cpu.gemm.int8_linear import Int8Linear
from model_worker.loading import prepare
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel, ModelRefused
from model_worker.runner import ModelRunner
from tests.model_worker.cpu.int8_reference import dequantized_model
from tests.model_worker.cpu.test_fused_stack import FUSED, batches, load, logits, relative, truth
from tests.model_worker.tiny_models import tiny_model

UNFUSED = ("gemma2", "mixtral", "gpt2", "stablelm")


def load_int8(arch: str, dtype: str, folder: Path, **overrides: Any) -> LoadedModel:
    return load(arch, dtype, folder, quantization="int8", **overrides)


@pytest.mark.parametrize("arch", FUSED)
@pytest.mark.parametrize("tied", [True, False])
def test_float32_stack_and_modules_equal_the_naive_reference(arch: str, tied: bool, tmp_path_factory: Any) -> None:
    loaded = load_int8(arch, "float32", tmp_path_factory.getbasetemp(), tie_word_embeddings=tied, seed=int(tied))
    assert loaded.stack is not None
    assert isinstance(loaded.model.lm_head, Int8Linear)
    steps = batches(np.random.default_rng(), 16, 32)
    want = truth(dequantized_model(loaded.model.config._name_or_path), steps)
    for backend in ("cpu", "reference"):
        assert relative(logits(ModelRunner(loaded, 32, 16, backend), steps), want) < 1e-5


@pytest.mark.parametrize("arch", UNFUSED)
def test_float32_modules_of_other_forms_equal_the_naive_reference(arch: str, tmp_path_factory: Any) -> None:
    loaded = load_int8(arch, "float32", tmp_path_factory.getbasetemp())
    assert loaded.stack is None
    assert isinstance(loaded.model.lm_head, Int8Linear)
    steps = batches(np.random.default_rng(), 16, 32)
    want = truth(dequantized_model(loaded.model.config._name_or_path), steps)
    assert relative(logits(ModelRunner(loaded, 32, 16), steps), want) < 1e-5


@pytest.mark.parametrize("arch", FUSED)
def test_bfloat16_stack_is_no_further_from_the_truth_than_plain_bfloat16(arch: str, tmp_path_factory: Any) -> None:
    """Activations are rounded as without quantization; int8's own steps are in the truth."""
    folder = tmp_path_factory.getbasetemp()
    loaded, plain = load_int8(arch, "bfloat16", folder, seed=3), load(arch, "bfloat16", folder, seed=3)
    assert loaded.stack is not None
    rng = np.random.default_rng()
    runs = [batches(rng, 16, 32) for _ in range(4)]
    path = loaded.model.config._name_or_path
    exact = truths(dequantized_model(path, torch.bfloat16), runs)
    usual = given(plain, "reference", runs), truths(plain_model(path), runs)
    for backend in ("cpu", "reference"):
        got = given(loaded, backend, runs)
        # The usual row is compared closely, all together loosely: a few that lie badly make a third of the error.
        assert usual_row(got, exact) < 1.4 * usual_row(*usual)
        assert relative(got, exact) < 2 * relative(*usual)


def usual_row(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median())


def given(loaded: LoadedModel, backend: str, runs: list[list[ForwardBatch]]) -> torch.Tensor:
    return torch.cat([logits(ModelRunner(loaded, 32, 16, backend), steps) for steps in runs])


def truths(model: Any, runs: list[list[ForwardBatch]]) -> torch.Tensor:
    return torch.cat([truth(model, steps) for steps in runs])


def plain_model(path: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager")
    return model.float()


def test_int8_halves_what_bfloat16_weights_take(tmp_path_factory: Any) -> None:
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": False}
    folder = tmp_path_factory.getbasetemp()
    plain, int8 = load("llama", "bfloat16", folder, **shape), load_int8("llama", "bfloat16", folder, **shape)
    assert plain.parameter_count == int8.parameter_count
    embedding: Any = plain.model.get_input_embeddings().weight
    assert 0.5 < (int8.parameter_bytes - embedding.nbytes) / (plain.parameter_bytes - embedding.nbytes) < 0.53


def test_what_cannot_be_quantized_is_refused(tmp_path_factory: Any) -> None:
    path = tiny_model("llama", tmp_path_factory.getbasetemp())
    with pytest.raises(ValueError, match="'int8' is not supported on cuda:0, only on the CPU: use quantization none"):
        load_model(path, "auto", "cuda:0", lambda *_: None, quantization="int8")
    with pytest.raises(ValueError, match="'fp3' is unknown: use one of none, int8"):
        load_model(path, "auto", "cpu", lambda *_: None, quantization="fp3")
    # Its projections are of a class of its own, and it has no head.
    bare = GPT2Model(GPT2Config(vocab_size=30, n_embd=8, n_layer=1, n_head=1, n_positions=9))
    with pytest.raises(ModelRefused, match="no plain linear layer"):
        prepare._quantize(bare, "GPT2Model")
