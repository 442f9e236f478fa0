"""A model whose kernels are still being compiled computes the same in plain torch, and goes over with what it has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model_worker.attention import cpu
from model_worker.cpu import kernel_cache
from model_worker.grammar import apply_mask
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner
from model_worker.sampling import draw_cpu
from model_worker.sampling.draw import Choices, choose
from tests.model_worker.cpu.test_fused_stack import FUSED, batches
from tests.model_worker.tiny_models import tiny_model


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compilations start a process that ends at once; what goes over writes it down here."""
    monkeypatch.setattr(sys, "executable", "/bin/true")
    return []


def deferred(arch: str, dtype: str, folder: Path) -> LoadedModel:
    extra: dict[str, Any] = {"hidden_size": 64} if arch in ("phi3", "qwen2", "mistral") else {}
    path = tiny_model(arch, folder, **extra)
    return load_model(path, dtype, "cpu", lambda *_: None, deferred=lambda _: True)


@pytest.mark.parametrize("arch", [*FUSED, "gpt2", "gemma2", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sequences_go_on_with_the_kernels(arch: str, dtype: str, tmp_path_factory: Any) -> None:
    rng = np.random.default_rng()
    loaded = deferred(arch, dtype, tmp_path_factory.getbasetemp())
    unproven = loaded.unproven
    assert loaded.stack is None
    assert unproven is not None
    assert (unproven.stack is not None) == (arch in FUSED)
    runner, plain = ModelRunner(loaded, 32, 16), ModelRunner(loaded, 32, 16, backend="reference")
    # What an earlier sequence left must not matter: it is multiplied by zero, and not all numbers give zero then.
    for values in runner.cache.v:
        values.normal_()
    steps = batches(rng, 16, 32)
    tolerance = 1e-4 if dtype == "float32" else 0.15
    for number, step in enumerate(steps):
        if number == len(steps) // 2:
            assert unproven.proves_itself()
            runner.go_over()
            assert runner.backend is cpu.attend
        got, want = runner.forward(step).double(), plain.forward(step).double()
        if len(got):
            assert float((got - want).norm() / want.norm()) < tolerance


def test_no_number_is_kept_for_the_kernels(tmp_path_factory: Any) -> None:
    loaded = deferred("llama", "bfloat16", tmp_path_factory.getbasetemp())
    runner = ModelRunner(loaded, 32, 16)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[5] = torch.nan  # type: ignore[operator]
    for step in batches(np.random.default_rng(), 16, 32):
        step.tokens[:] = 5
        runner.forward(step)
    assert all(torch.isfinite(values).all() for values in runner.cache.v)


def test_until_then_no_kernel_is_called(ended: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*_: Any) -> None:
        raise AssertionError("a kernel was called, which would have compiled it")

    rng = np.random.default_rng()
    scaled = torch.from_numpy(rng.standard_normal((4, 300)).astype(np.float32))
    scaled -= scaled.amax(1, keepdim=True)
    choices = Choices(
        greedy=np.array([True, False, False, False]),
        top_k=np.array([300, 300, 20, 300], np.int32),
        top_p=np.array([1.0, 1.0, 0.9, 0.5]),
        log_min_p=np.full(4, -np.inf, np.float32),
        keys=rng.integers(0, 1 << 62, 4).astype(np.uint64),
        logprobs=np.zeros(4, np.int8),
    )
    masks = rng.integers(-(2**31), 2**31, (4, 10)).astype(np.int32)

    def results() -> tuple[list[int], torch.Tensor]:
        logits = scaled.clone()
        apply_mask.apply_masks(logits, np.arange(4), masks)
        return choose(scaled, scaled.argmax(1), choices)[0].tolist(), logits

    want = results()
    compilation = kernel_cache.Compilation(torch.bfloat16, lambda: ended.append("went over"))
    assert not kernel_cache.available()
    with monkeypatch.context() as patched:
        patched.setattr(draw_cpu, "choose", unwanted)
        patched.setattr(apply_mask, "_forbid_rows", unwanted)
        got = results()
    compilation.settle()
    assert kernel_cache.available()
    assert ended == ["went over"]
    assert got[0] == want[0]
    assert torch.equal(got[1], want[1])


def test_what_was_compiled_is_known_by_type_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache" / "numba"))  # which is not there yet
    assert not kernel_cache.kept(torch.bfloat16)
    kernel_cache.keep(torch.bfloat16)
    assert kernel_cache.kept(torch.bfloat16)
    assert not kernel_cache.kept(torch.float32)
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    assert kernel_cache.kept(torch.float32), "where nothing can be kept, waiting would never end"
