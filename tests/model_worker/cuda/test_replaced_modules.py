"""Norms and gated layers computed by Triton kernels, interpreted on the CPU, give what transformers' modules give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from model_worker.joined_linear import JoinedLinear
from model_worker.loading import verify
from model_worker.loading.gpu_modules import ReplacedModules
from model_worker.loading.load import load_model
from model_worker.loading.prepare import _replace_modules
from model_worker.model import ModelRefused
from tests.model_worker.cuda.interpreter import need_triton
from tests.model_worker.tiny_models import tiny_model

need_triton()

from model_worker.cuda import gate_kernel, norm_kernel  # noqa: E402


# Norms and gated layers of each layer, and the last norm; Qwen 3 has norms of q and k, Gemma 3 two more.
@pytest.mark.parametrize(("family", "norms", "gated"), [("llama", 2, 1), ("qwen3", 4, 1), ("gemma3_text", 6, 1)])
def test_a_model_gives_the_same_logits(
    family: str, norms: int, gated: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path: Path = tiny_model(family, tmp_path_factory.getbasetemp())
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    tokens = torch.randint(3, model.config.vocab_size, (1, 5))
    with torch.inference_mode():
        want = model(tokens).logits
        replaced = ReplacedModules(model)
        assert len(replaced) == (norms + gated) * model.config.num_hidden_layers + 1
        got = model(tokens).logits
        replaced.undo()
        again = model(tokens).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert torch.equal(again, want)
    assert len(replaced) == 0


def test_a_model_with_other_logits_gets_its_modules_back(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_model(tiny_model("llama", tmp_path_factory.getbasetemp()), "float32", "cpu", lambda *_: None)
    tokens = verify.tokens(loaded.model.config, loaded.device)
    with torch.inference_mode():
        expected = verify.eager_logits(loaded.model, tokens)
    norms = [module for module in loaded.model.modules() if type(module).__name__ == "LlamaRMSNorm"]
    _replace_modules(loaded, tokens, expected, lambda _: False)
    assert not any("forward" in vars(norm) for norm in norms), "another rank has none"
    _replace_modules(loaded, tokens, expected)
    assert all("forward" in vars(norm) for norm in norms)

    class Wrong(ReplacedModules):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            vars(norms[0])["forward"] = lambda x: x * 2

    monkeypatch.setattr("model_worker.loading.prepare.ReplacedModules", Wrong)
    _replace_modules(loaded, tokens, expected)
    assert not any("forward" in vars(norm) for norm in norms)
    assert "kernels give other logits" in caplog.text
    with pytest.raises(ModelRefused, match="gives other logits"):
        _replace_modules(loaded, tokens, expected + 9 * torch.randn(expected.shape))


class NotQuiteRMSNorm(nn.Module):
    """A norm that subtracts the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, (24,), self.weight, eps=self.eps)


def test_a_module_that_only_looks_like_a_norm_stays_as_it_is() -> None:
    assert len(ReplacedModules(nn.Sequential(NotQuiteRMSNorm()))) == 0


def test_new_weights_of_a_replaced_norm_count() -> None:
    norm = nn.RMSNorm(16, eps=1e-6)
    model = nn.Sequential(norm)
    assert len(ReplacedModules(model)) == 1
    x = torch.randn(4, 16)
    with torch.no_grad():
        norm.weight.mul_(3)
        torch.testing.assert_close(model(x), nn.functional.rms_norm(x, (16,), norm.weight, 1e-6))


def test_kernels_that_fail_leave_all_modules_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def fails(*arguments: object) -> torch.Tensor:
        calls.append(arguments)
        raise TypeError("no such compiler")

    monkeypatch.setattr(norm_kernel, "rms_norm", fails)
    norm = nn.RMSNorm(16, eps=1e-6)
    assert len(ReplacedModules(nn.Sequential(norm))) == 0
    assert calls
    assert "no such compiler" in caplog.text
    assert "forward" not in vars(norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_of_any_size_equal_torch(dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, 3, 700).to(dtype)
    for activation, function in (
        (gate_kernel.SILU, nn.functional.silu),
        (gate_kernel.GELU_TANH, lambda x: nn.functional.gelu(x, approximate="tanh")),
    ):
        got = gate_kernel.gated(gate, up, activation)
        # Both round twice: an activation at the edge between two numbers may go either way.
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6}[dtype]
        torch.testing.assert_close(got, function(gate) * up, rtol=tolerance, atol=tolerance)


class OwnSum:
    """The sum of two ranks with equal parts, and how often it was asked for."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return 2 * part


def test_a_gated_layer_of_a_group_is_proven_without_the_other_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    path: Path = tiny_model("llama", tmp_path_factory.getbasetemp())
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    gated: Any = model.model.layers[0].mlp
    added = OwnSum()
    gated.down_proj = JoinedLinear(gated.down_proj, added, None)
    x = torch.randn(3, model.config.hidden_size)
    with torch.inference_mode():
        want = gated(x)
        assert added.count == 1
        ReplacedModules(model)
        assert added.count == 1
        assert "forward" in vars(gated)
        torch.testing.assert_close(gated(x), want, rtol=1e-4, atol=1e-5)
    assert added.count == 2
