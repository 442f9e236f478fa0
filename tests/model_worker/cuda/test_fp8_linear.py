"""Layers of FP8 numbers: torch's product on a CPU stands for a GPU's, beside float32 products of the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from model_worker.cpu.gemm.encoded_linear import Fp8Numbers
from model_worker.cuda.fp8_linear import Fp8Linear, unsupported
from model_worker.loading import verify
from model_worker.loading.checkpoint import read_config
from model_worker.loading.prepare import prepare
from model_worker.loading.quantized.scheme import Scheme, scheme_of
from model_worker.loading.stored import open_stored
from model_worker.loading.weights import load_quantized
from model_worker.model import ModelRefused
from tests.model_worker.loading.quantized_checkpoints import FORMATS, Format, quantize_checkpoint
from tests.model_worker.tiny_models import tiny_model

CPU = torch.device("cpu")


def numbers(outputs: int, inputs: int, draw: torch.Generator) -> Fp8Numbers:
    values = torch.randn(outputs, inputs, generator=draw) * 50
    return Fp8Numbers(values.to(torch.float8_e4m3fn), (0.5 + torch.rand(outputs, generator=draw)) / 100)


def rounded(x: Tensor) -> Tensor:
    """Each token rounded to e4m3, with the scale that makes its largest value the largest number."""
    scales = x.abs().amax(-1, keepdim=True) / 448
    return torch.where(scales > 0, (x / scales).to(torch.float8_e4m3fn).float() * scales, 0.0)


@pytest.mark.parametrize("shape", [(1, 64), (3, 64), (2, 5, 64)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_rounded_inputs(shape: tuple[int, ...], biased: bool) -> None:
    draw = torch.Generator().manual_seed(torch.seed() % 1000)
    weight = numbers(48, 64, draw)
    bias = torch.randn(48, generator=draw) if biased else None
    x = torch.randn(shape, generator=draw) * torch.rand(*shape[:-1], 1, generator=draw) * 1000
    got = Fp8Linear(*weight, bias)(x)
    want = torch.nn.functional.linear(rounded(x), weight.values.float() * weight.scales[:, None], bias)
    # The product is rounded to bfloat16.
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2 * float(want.abs().max()))


def test_a_token_that_is_not_finite_or_nothing_changes_no_other() -> None:
    draw = torch.Generator().manual_seed(0)
    linear = Fp8Linear(*numbers(32, 32, draw), None)
    x = torch.randn(4, 32, generator=draw)
    alone = linear(x)
    x[1] = 0
    x[2, 3] = torch.nan
    got = linear(x)
    assert torch.equal(got[[0, 3]], alone[[0, 3]])
    assert torch.equal(got[1], torch.zeros(32))
    assert got[2].isnan().all()


def test_this_machine_multiplies_them() -> None:
    assert unsupported(CPU) == ""


def test_a_device_that_cannot_or_does_it_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch._scaled_mm

    def missing(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no FP8 here\nbacktrace")

    monkeypatch.setattr(torch, "_scaled_mm", missing)
    assert unsupported(CPU) == "no FP8 here"
    monkeypatch.setattr(torch, "_scaled_mm", lambda *given, **named: product(*given, **named) * 1.5)
    assert "wrong by" in unsupported(CPU)


def loaded(path: Path) -> Any:
    """The model as a GPU's worker loads it."""
    config = read_config(path)
    scheme = scheme_of(path, config)
    return load_quantized(
        AutoModelForCausalLM,
        open_stored(path),
        scheme,
        config,
        "Llama",
        torch.float32,
        CPU,
        {},
        False,
        stays_on_gpu=True,
    ).eval()


def with_rounded_inputs(form: Format) -> Format:
    """The format of a checkpoint of compressed-tensors that says so; others need not."""
    groups = form.config.get("config_groups", {})
    rounded = {name: {**group, "input_activations": {"num_bits": 8, "type": "float"}} for name, group in groups.items()}
    return form._replace(config={**form.config, "config_groups": rounded}) if groups else form


@pytest.mark.parametrize("name", ["fp8 of tensors", "fp8 of compressed-tensors", "fp8 of ModelOpt", "fp8 of blocks"])
def test_a_checkpoint_keeps_its_numbers(name: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """Those with scales of blocks of another size than a kernel takes are decoded."""
    source = tiny_model("llama", tmp_path_factory.getbasetemp(), hidden_size=64, intermediate_size=96, head_dim=16)
    path = quantize_checkpoint(source, tmp_path / "q", with_rounded_inputs(FORMATS[name]))
    model = loaded(path)
    reference = AutoModelForCausalLM.from_pretrained(path / "exact", dtype=torch.float32).eval()
    kept = {key: module for key, module in model.named_modules() if isinstance(module, Fp8Linear)}
    assert bool(kept) == ("blocks" not in name)
    for key, module in kept.items():
        assert torch.equal(module.weight, reference.get_submodule(key).weight)
    tokens = verify.tokens(model.config, CPU)
    with torch.inference_mode():
        got = verify.eager_logits(model, tokens)
        want = verify.eager_logits(reference, tokens)
    error = verify.median_error(got, want)
    assert error < 0.08 if kept else error < 1e-4
    served = prepare(model, CPU, "none", lambda *_: None, has_kernels=lambda *_: False)
    assert served.attention_name == "reference"


@pytest.mark.parametrize(
    ("scheme", "rounds"),
    [
        (Scheme("fp8", {"activation_scheme": "dynamic"}), True),
        (Scheme("modelopt", {"quant_algo": "FP8"}), True),
        (Scheme("gptq"), False),
        (Scheme(), False),
        (Scheme("compressed-tensors", {"config_groups": {"group_0": {"input_activations": {"num_bits": 8}}}}), True),
        (Scheme("compressed-tensors", {"config_groups": {"group_0": {"input_activations": None}}}), False),
    ],
)
def test_a_scheme_says_whether_inputs_are_rounded(scheme: Scheme, rounds: bool) -> None:
    assert scheme.rounds_inputs == rounds


def test_a_weight_that_is_not_finite_is_named(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path_factory.getbasetemp(), hidden_size=64, intermediate_size=96, head_dim=16)
    model = loaded(quantize_checkpoint(source, tmp_path / "q", FORMATS["fp8 of tensors"]))
    name, layer = next((key, module) for key, module in model.named_modules() if isinstance(module, Fp8Linear))
    layer.codes.data.view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(ModelRefused, match=rf"1 of the {layer.codes.numel()} values of {name}.codes"):
        prepare(model, CPU, "none", lambda *_: None, has_kernels=lambda *_: False)
