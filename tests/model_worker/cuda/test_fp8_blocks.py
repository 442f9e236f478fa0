"""Layers of FP8 numbers with scales of blocks: kernels interpreted on a CPU, beside float32 products of these numbers.

The interpreter rounds to FP8 in its own way, so on a CPU torch rounds, and the kernel that rounds is given numbers that
need none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from model_worker.cuda import fp8_blocks, timing
from model_worker.cuda.fp8_blocks import SIDE, BlockFp8Linear, rounded_groups, slower, unsupported
from model_worker.cuda.joined_linear import JoinedLinear
from model_worker.loading import gpu_weights, verify
from model_worker.loading.checkpoint import read_config
from model_worker.loading.quantized.scheme import scheme_of
from model_worker.loading.stored import open_stored
from model_worker.loading.weights import load_quantized
from tests.model_worker.cuda.interpreter import need_triton
from tests.model_worker.loading.quantized_checkpoints import BLOCKS_OF_128, quantize_checkpoint
from tests.model_worker.tiny_models import tiny_model

need_triton()

from model_worker.cuda import fp8_block_kernel  # noqa: E402

CPU = torch.device("cpu")
LARGEST = 448.0
LEAST = 1e-12


def layer(outputs: int, inputs: int, biased: bool = False) -> BlockFp8Linear:
    codes = (torch.randn(outputs, inputs) * 60).to(torch.float8_e4m3fn)
    scales = torch.randn(-(-outputs // SIDE), -(-inputs // SIDE)).exp() / 100
    return BlockFp8Linear(codes, scales, torch.randn(outputs) if biased else None)


def spread(scales: Tensor, width: int) -> Tensor:
    return scales.repeat_interleave(SIDE, 1)[:, :width]


def rounded(x: Tensor) -> Tensor:
    """Each group of a token rounded to e4m3, with the scale that makes its largest value the largest number."""
    groups = x.float().split(SIDE, -1)
    scales = [(group.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(LEAST) for group in groups]
    pairs = zip(groups, scales, strict=True)
    return torch.cat([(group / scale).to(torch.float8_e4m3fn).float() * scale for group, scale in pairs], -1)


# Tokens of each kind of tile, and of several; outputs and inputs of less than a block, and of no whole number of them.
@pytest.mark.parametrize(
    ("shape", "outputs", "inputs"),
    [((1,), 48, 64), ((16,), 128, 128), ((17,), 200, 272), ((3, 11), 384, 144), ((65,), 130, 400), ((600,), 33, 129)],
)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_rounded_groups(shape: tuple[int, ...], outputs: int, inputs: int, biased: bool) -> None:
    linear = layer(outputs, inputs, biased)
    x = torch.randn(*shape, inputs) * torch.randn(*shape, 1).exp() * torch.randn(inputs).exp()
    want = nn.functional.linear(rounded(x), linear.weight, linear.bias)
    got = linear(x)
    assert got.dtype == x.dtype
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_a_weight_is_decoded_block_by_block() -> None:
    linear = layer(300, 200)
    assert torch.equal(linear.weight[129, 127], linear.codes[129, 127].float() * linear.scales[1, 0])
    assert torch.equal(linear.weight[299, 199], linear.codes[299, 199].float() * linear.scales[2, 1])


def test_half_precision_is_rounded_once() -> None:
    linear = layer(40, 256)
    x = torch.randn(5, 256).half()
    want = nn.functional.linear(rounded(x), linear.weight)
    torch.testing.assert_close(linear(x), want.half(), rtol=1e-3, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [16, 128, 1500])
def test_groups_that_need_no_rounding_are_kept(width: int, dtype: torch.dtype) -> None:
    numbers = (torch.randn(3, width) * 60).to(torch.float8_e4m3fn)
    numbers.view(torch.uint8)[:, 3::SIDE] = 0x7E  # the largest
    scales = torch.exp2(torch.randint(-4, 2, (3, -(-width // SIDE))).float())
    rows = (numbers.float() * spread(scales, width)).to(dtype)
    for found in (fp8_block_kernel.round_groups(rows, LARGEST, LEAST), rounded_groups(rows)):
        assert torch.equal(found[1], scales)
        assert torch.equal(found[0].float(), numbers.float())


def test_a_token_that_is_not_finite_or_nothing_changes_no_other() -> None:
    linear = layer(32, 160)
    x = torch.randn(4, 160)
    alone = linear(x)
    x[1] = 0
    x[2, 3] = torch.nan
    got = linear(x)
    assert torch.equal(got[[0, 3]], alone[[0, 3]])
    assert torch.equal(got[1], torch.zeros(32))
    assert got[2].isnan().all()
    _, scales = fp8_block_kernel.round_groups(x, LARGEST, LEAST)
    assert scales[2, 0].isnan()
    assert scales[2, 1].isfinite()
    torch.testing.assert_close(scales[1], torch.full((2,), LEAST))


def test_layers_of_the_same_input_are_one_product() -> None:
    parts = [layer(256, 144, True), layer(128, 144, True), layer(100, 144, True)]
    x = torch.randn(7, 144)
    want = torch.cat([part(x) for part in parts], -1)
    joined = JoinedLinear(parts)
    assert len(joined._products) == 1
    torch.testing.assert_close(joined(x), want)
    torch.testing.assert_close(torch.cat([part(x) for part in parts], -1), want)
    crossing = JoinedLinear(parts[::-1])
    assert len(crossing._products) == 2, "a block would have outputs of two layers"
    torch.testing.assert_close(crossing(x), torch.cat([part(x) for part in parts[::-1]], -1))


@pytest.fixture
def small_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels are slow."""
    monkeypatch.setattr(fp8_blocks, "_TRIAL_INPUTS", 2 * SIDE + 16)


def test_this_machine_multiplies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_blocks, "_TRIAL_TOKENS", (1, 17))
    assert unsupported(CPU) == ""


@pytest.mark.usefixtures("small_trials")
def test_what_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    product, rounding = fp8_block_kernel.multiply_blocks, fp8_blocks.rounded_groups

    def missing(*_: Any) -> Tensor:
        raise RuntimeError("no FP8 here\nbacktrace")

    monkeypatch.setattr(fp8_block_kernel, "multiply_blocks", missing)
    assert unsupported(CPU) == "no FP8 here"
    for wrong in (
        lambda a, a_scales, b, b_scales, *rest: product(a, a_scales, b, b_scales.flip(1), *rest),
        lambda a, a_scales, *rest: product(a, a_scales.roll(1, 1), *rest),
        lambda a, *rest: product(a, *rest).roll(1, 0) if len(a) > 512 else product(a, *rest),
        lambda *given: product(*given) * (1.5 if given[4] is None else 1),
    ):
        monkeypatch.setattr(fp8_block_kernel, "multiply_blocks", wrong)
        assert "wrong by" in unsupported(CPU)
    monkeypatch.setattr(fp8_block_kernel, "multiply_blocks", product)
    monkeypatch.setattr(fp8_blocks, "rounded_groups", lambda rows: (rounding(rows)[0], rounding(rows)[1] * 1.2))
    assert "not those of the inputs" in unsupported(CPU)


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ((1.0, 1.5, 1.0, 1.5, 1.0, 1.5, 5.0, 4.9), ""),
        (
            (1.0, 1.5, 1.0, 1.5, 1.0, 1.5, 5.0, 2.0),
            "a product of 1024 tokens takes 5 ms, and 2 ms with a decoded weight",
        ),
        ((3.0, 1.5, 1.0, 2.0), "a product of 16 tokens takes 3 ms, and 1.5 ms with a decoded weight"),
    ],
)
def test_what_is_slower_than_a_decoded_weight_is_found_out(
    times: tuple[float, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are those of products in FP8 and of decoded weights, by turns."""
    left = iter(times)

    def milliseconds(call: Callable[[], Tensor]) -> float:
        assert call().shape[1] == 32
        return next(left)

    monkeypatch.setattr(timing, "milliseconds", milliseconds)
    assert slower(CPU, 32, 48, torch.bfloat16) == reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no timer here\nbacktrace"), "its products cannot be timed: no timer here"),
        (torch.OutOfMemoryError("no memory"), ""),
    ],
)
def test_weights_that_cannot_be_timed_are_decoded(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where the card has no memory for decoded ones they stay."""

    def milliseconds(call: Callable[[], Tensor]) -> float:
        raise error

    monkeypatch.setattr(timing, "milliseconds", milliseconds)
    assert slower(CPU, 32, 48, torch.bfloat16) == reason


SIZES: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 208, "head_dim": 32, "num_hidden_layers": 1}


def loaded(path: Path) -> Any:
    """The model as a GPU's worker loads it."""
    config = read_config(path)
    scheme = scheme_of(path, config)
    return load_quantized(
        AutoModelForCausalLM, open_stored(path), scheme, config, "Llama", torch.float32, CPU, {}, False, True
    ).eval()


@pytest.mark.usefixtures("small_trials")
def test_a_checkpoint_keeps_its_numbers(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fp8_blocks, "_TRIAL_TOKENS", (1, 17))
    source = tiny_model("llama", tmp_path_factory.getbasetemp(), **SIZES)
    path = quantize_checkpoint(source, tmp_path / "q", BLOCKS_OF_128)
    with caplog.at_level(logging.INFO, gpu_weights.__name__):
        model = loaded(path)
    kept = {key: module for key, module in model.named_modules() if isinstance(module, BlockFp8Linear)}
    assert f"{len(kept)} weights stay in FP8" in caplog.text
    assert len(kept) == 7 * model.config.num_hidden_layers
    reference = AutoModelForCausalLM.from_pretrained(path / "exact", dtype=torch.float32).eval()
    for key, module in kept.items():
        assert torch.equal(module.weight, reference.get_submodule(key).weight)
    tokens = verify.tokens(model.config, CPU)
    with torch.inference_mode():
        error = verify.median_error(verify.eager_logits(model, tokens), verify.eager_logits(reference, tokens))
    assert error < 0.08


@pytest.mark.usefixtures("small_trials")
def test_a_card_that_computes_them_wrongly_gets_decoded_weights(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = tiny_model("llama", tmp_path_factory.getbasetemp(), **SIZES)
    path = quantize_checkpoint(source, tmp_path / "q", BLOCKS_OF_128)
    product = fp8_block_kernel.multiply_blocks
    monkeypatch.setattr(fp8_block_kernel, "multiply_blocks", lambda *given: product(*given) * 1.5)
    with caplog.at_level(logging.INFO, gpu_weights.__name__):
        model = loaded(path)
    assert (
        "7 weights in FP8 are decoded, which takes 0.00 GB, since its products of FP8 numbers in blocks are wrong by 0."
        in caplog.text
    )
    reference = AutoModelForCausalLM.from_pretrained(path / "exact", dtype=torch.float32).eval()
    tokens = verify.tokens(model.config, CPU)
    with torch.inference_mode():
        error = verify.median_error(verify.eager_logits(model, tokens), verify.eager_logits(reference, tokens))
    assert error < 1e-4
