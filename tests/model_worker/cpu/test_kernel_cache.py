"""A model whose kernels are not compiled yet computes the same in plain torch, and compiles none of them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model_worker.cpu import kernel_cache
from model_worker.grammar import apply_mask
from model_worker.loading.load import load_model
from model_worker.runner import ModelRunner
from model_worker.sampling import draw_cpu
from model_worker.sampling.draw import Choices, choose
from tests.model_worker.cpu.test_fused_stack import FUSED, batches
from tests.model_worker.tiny_models import tiny_model


@pytest.mark.parametrize("arch", [FUSED[0], "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_kernels_the_model_computes_in_plain_torch(arch: str, dtype: str, tmp_path_factory: Any) -> None:
    path = tiny_model(arch, tmp_path_factory.getbasetemp())
    plain = load_model(path, dtype, "cpu", lambda *_: None, has_kernels=lambda *_: False)
    fast = load_model(path, dtype, "cpu", lambda *_: None)
    assert plain.stack is None
    assert not plain.has_kernels
    assert fast.has_kernels
    assert not any(type(module).__module__.startswith("model_worker") for module in plain.model.modules())
    runner, other = ModelRunner(plain, 32, 16), ModelRunner(fast, 32, 16)
    assert runner.attention_name == "reference"
    assert runner.description == "plain torch, while kernels compile"
    assert other.description != runner.description
    tolerance = 1e-4 if dtype == "float32" else 0.15
    for step in batches(np.random.default_rng(), 16, 32):
        got, want = runner.backend.logits(step).double(), other.backend.logits(step).double()
        if len(got):
            assert float((got - want).norm() / want.norm()) < tolerance


@pytest.mark.slow
def test_int8_weights_are_kernels_in_any_case(tmp_path_factory: Any) -> None:
    path = tiny_model("llama", tmp_path_factory.getbasetemp())
    loaded = load_model(path, "float32", "cpu", lambda *_: None, quantization="int8", has_kernels=lambda *_: False)
    assert loaded.has_kernels


def test_until_then_no_kernel_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
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

    def results(has_kernels: bool) -> tuple[list[int], torch.Tensor]:
        logits = scaled.clone()
        apply_mask.apply_masks(logits, np.arange(4), masks, has_kernels)
        return choose(scaled, scaled.argmax(1), choices, has_kernels)[0].tolist(), logits

    want = results(True)
    with monkeypatch.context() as patched:
        patched.setattr(draw_cpu, "choose", unwanted)
        patched.setattr(apply_mask, "_forbid_rows", unwanted)
        got = results(False)
    assert got[0] == want[0]
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("fails", [False, True])
def test_a_compilation_is_done_when_its_kernels_are_there(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false" if fails else "/bin/sleep")  # it sleeps for no time, in vain
    compilation = kernel_cache.Compilation(torch.bfloat16)
    if not fails:
        kernel_cache.record_compiled(torch.bfloat16)
    deadline = time.monotonic() + 10
    while not compilation.done and compilation._done is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert compilation.done is not fails
    assert ("could not be compiled" in caplog.text) is fails


def test_what_was_compiled_is_known_by_type_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache" / "numba"))  # which is not there yet
    assert not kernel_cache.are_compiled(torch.bfloat16)
    kernel_cache.record_compiled(torch.bfloat16)
    assert kernel_cache.are_compiled(torch.bfloat16)
    assert not kernel_cache.are_compiled(torch.float32)
    assert not kernel_cache.are_compiled(torch.bfloat16, kernel_cache.ENCODER)
    kernel_cache.record_compiled(torch.float32, kernel_cache.ENCODER)
    assert kernel_cache.are_compiled(torch.float32, kernel_cache.ENCODER)
    assert not kernel_cache.are_compiled(torch.float32)
    # A recogniser has an encoder and a decoder.
    assert not kernel_cache.are_compiled(torch.float32, kernel_cache.SPEECH)
    kernel_cache.record_compiled(torch.float32)
    assert kernel_cache.are_compiled(torch.float32, kernel_cache.SPEECH)
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    assert kernel_cache.are_compiled(torch.float32), "where nothing can be kept, waiting would never end"
