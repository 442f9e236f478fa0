"""Experts in FP8 and in four bits: kernels interpreted on a CPU, beside float64 products expert by expert."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from model_worker.adapters.experts import is_experts
from model_worker.cuda import experts_trial, timing
from model_worker.cuda.encoded_experts import (
    ExpertStack,
    Fp8Experts,
    GroupedExperts,
    forward_of,
    put_stacks,
    stack_of,
    takes,
)
from model_worker.cuda.fp8_blocks import SIDE, BlockFp8Linear, rounded_groups
from model_worker.cuda.fp8_linear import Fp8Linear
from model_worker.cuda.grouped_linear import MIDDLE, OFFSETS, TABLE, ZEROS
from model_worker.cuda.routing import route
from model_worker.loading import gpu_weights, verify
from model_worker.loading.gpu_kinds import kind_of
from tests.model_worker.cuda.fake_gpu import DEVICE, fake_gpu
from tests.model_worker.cuda.in_four_bits import grouped_layer
from tests.model_worker.cuda.interpreter import need_triton
from tests.model_worker.cuda.launches import counted_launches
from tests.model_worker.cuda.on_gpu import loaded
from tests.model_worker.loading.quantized_checkpoints import (
    BLOCKS_OF_128,
    FORMATS,
    Format,
    quantize_checkpoint,
    quantize_experts,
)
from tests.model_worker.tiny_models import tiny_model

need_triton()

from model_worker.cuda import grouped_experts_kernel  # noqa: E402

CPU = torch.device("cpu")
EXPERTS = 5
OUTPUTS, INPUTS = 130, 192


def in_four_bits(kind: int, ordered: bool = False) -> ExpertStack:
    return stack_of([[grouped_layer(OUTPUTS, INPUTS, 64, kind, ordered)] for _ in range(EXPERTS)], torch.float32)


def in_fp8(blocked: bool) -> ExpertStack:
    def one() -> Any:
        codes = (torch.randn(OUTPUTS, INPUTS) * 60).to(torch.float8_e4m3fn)
        if blocked:
            return BlockFp8Linear(codes, torch.randn(-(-OUTPUTS // SIDE), -(-INPUTS // SIDE)).exp() / 100, None)
        return Fp8Linear(codes, torch.randn(OUTPUTS).exp() / 100, None)

    return stack_of([[one()] for _ in range(EXPERTS)], torch.float32)


STACKS = {
    "middle": lambda: in_four_bits(MIDDLE),
    "zeros": lambda: in_four_bits(ZEROS),
    "offsets": lambda: in_four_bits(OFFSETS),
    "in an order": lambda: in_four_bits(ZEROS, ordered=True),
    "table": lambda: in_four_bits(TABLE),
    "blocks": lambda: in_fp8(True),
    "outputs": lambda: in_fp8(False),
}


def chosen_of(tokens: int, count: int, experts: int = EXPERTS) -> Tensor:
    return torch.stack([torch.randperm(experts)[:count] for _ in range(tokens)])


def meant(stack: ExpertStack, x: Tensor) -> Tensor:
    """Tokens as they are multiplied, f64."""
    if isinstance(stack, GroupedExperts):
        return x.double()
    codes, scales = rounded_groups(x)
    return codes.double() * scales.repeat_interleave(SIDE, 1)[:, : x.shape[1]]


@pytest.mark.parametrize("name", STACKS)
# Tiles of 16, 32 and 64 pairs, experts of several tiles, and with none.
@pytest.mark.parametrize(("tokens", "count"), [(1, 2), (3, 1), (40, 2), (150, 1), (200, 2)])
def test_pairs_are_multiplied_by_their_experts(name: str, tokens: int, count: int) -> None:
    stack = STACKS[name]()
    chosen = chosen_of(tokens, count)
    routing = route(chosen, EXPERTS)
    for rows in (tokens, tokens * count):
        x = torch.randn(rows, INPUTS)
        inputs = meant(stack, x).repeat_interleave(tokens * count // rows, 0)
        want = torch.stack([stack.matrix(e).double() @ row for e, row in zip(chosen.flatten(), inputs, strict=True)])
        bias = None
        if rows == tokens:
            bias = torch.randn(EXPERTS, OUTPUTS)
            want += bias[chosen.flatten()]
        got = stack.product(x, routing, bias)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize("name", STACKS)
def test_no_tokens_have_no_products(name: str) -> None:
    routing = route(torch.empty(0, 2, dtype=torch.int64), EXPERTS)
    assert STACKS[name]().product(torch.empty(0, INPUTS), routing).shape == (0, OUTPUTS)


def test_routes_have_each_pair_once() -> None:
    for tokens, count, experts in ((1, 1, 3), (7, 2, 4), (64, 8, 128), (300, 4, 8), (5, 1, 1)):
        chosen = chosen_of(tokens, count, experts)
        routing = route(chosen, experts)
        seen: list[int] = []
        for expert, first, end in zip(*(one.tolist() for one in routing[1:4]), strict=True):
            if first < end:
                pairs = routing.pairs[first : min(end, first + routing.rows)]
                assert set(chosen.flatten()[pairs].tolist()) == {expert}
                seen += pairs.tolist()
        assert sorted(seen) == list(range(tokens * count))


def test_a_pair_does_not_depend_on_those_beside_it() -> None:
    stack = in_four_bits(ZEROS)
    x, chosen = torch.randn(12, INPUTS), chosen_of(12, 2)
    whole = stack.product(x, route(chosen, EXPERTS))
    for row in range(4):
        assert torch.equal(stack.product(x[row, None], route(chosen[row, None], EXPERTS)), whole[2 * row : 2 * row + 2])


def experts_module(folder: Path) -> Any:
    path = tiny_model("qwen3_moe", folder, **SIZES)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval(), model.model.layers[0].mlp.experts


def test_a_recorded_step_may_route_anew(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for the device, and launches do not depend on what is chosen."""
    _, module = experts_module(tmp_path_factory.getbasetemp())
    hidden, inner = module.down_proj.shape[1:]
    experts = module.num_experts
    up = stack_of([[grouped_layer(2 * inner, hidden, 32, ZEROS)] for _ in range(experts)], torch.float32)
    down = stack_of([[grouped_layer(hidden, inner, 32, ZEROS)] for _ in range(experts)], torch.float32)
    put_stacks(module, [up, down])
    with fake_gpu(monkeypatch):
        for stack in (up, down):
            for name, parameter in list(stack._parameters.items()):
                if parameter is not None:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype, device=DEVICE)
                    stack._parameters[name] = torch.nn.Parameter(fake, requires_grad=False)
        x = torch.empty(8, hidden, device=DEVICE, dtype=torch.bfloat16)
        chosen = torch.empty(8, 2, device=DEVICE, dtype=torch.int64)
        with counted_launches(monkeypatch, run=False) as launches:
            out = forward_of(module)(x, chosen, torch.empty(8, 2, device=DEVICE, dtype=torch.bfloat16))
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert not launches.from_host
    assert launches.names.count("grouped_experts_kernel") == 2
    assert len(launches.names) <= 23, launches.names


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "head_dim": 16,
}
IN_BLOCKS = {**SIZES, "moe_intermediate_size": 128, "hidden_size": 128}
CHANNELS = Format(
    FORMATS["fp8 of compressed-tensors"].write,
    {
        **FORMATS["fp8 of compressed-tensors"].config,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": "float", "num_bits": 8},
                "input_activations": {"num_bits": 8, "type": "float"},
            }
        },
    },
)
# A format, sizes, the stacks that a layer's experts become, and the largest error of logits.
CHECKPOINTS: dict[str, tuple[Format, dict[str, Any], type[ExpertStack] | None, float]] = {
    "awq": (FORMATS["awq"], SIZES, GroupedExperts, 1e-4),
    "gptq": (FORMATS["gptq"], SIZES, GroupedExperts, 1e-4),
    "w4a16": (FORMATS["w4a16"], SIZES, GroupedExperts, 1e-4),
    # Those of gate and up differ.
    "gptq in order of activations": (FORMATS["gptq in order of activations"], SIZES, None, 1e-4),
    "gptq in one order": (FORMATS["gptq in one order"], SIZES, GroupedExperts, 1e-4),
    "fp8 of blocks": (BLOCKS_OF_128, IN_BLOCKS, Fp8Experts, 0.08),
    "fp8 of outputs": (CHANNELS, SIZES, Fp8Experts, 0.08),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_keeps_its_experts(
    name: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    form, sizes, kind, most = CHECKPOINTS[name]
    # Files have the tensors of each expert.
    source = tiny_model("qwen3_moe", tmp_path_factory.getbasetemp(), **sizes)
    path = quantize_checkpoint(source, tmp_path / "q", form)
    with caplog.at_level(logging.INFO, gpu_weights.__name__):
        model = loaded(path)
    reference: Any = AutoModelForCausalLM.from_pretrained(path / "exact", dtype=torch.float32).eval()
    module, plain = (one.model.layers[0].mlp.experts for one in (model, reference))
    assert is_experts(module), "adapters take them"
    for projection in ("gate_up_proj", "down_proj"):
        kept = getattr(module, projection)
        assert isinstance(kept, ExpertStack) == (kind is not None)
        assert kind is None or type(kept) is kind
        for expert in range(sizes["num_experts"]):
            assert torch.equal(kept[expert], getattr(plain, projection)[expert])
    assert ("weights stay of experts in" in caplog.text) == (kind is not None)
    tokens = verify.tokens(model.config, CPU)
    with torch.inference_mode():
        error = verify.median_error(verify.eager_logits(model, tokens), verify.eager_logits(reference, tokens))
    assert error < most


def test_experts_of_gpt_oss_stay_in_four_bits(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Outputs for the gate and the rest take turns, matrices are transposed, and all have biases."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
    }
    path = quantize_experts(tiny_model("gpt_oss", tmp_path_factory.getbasetemp(), **sizes), tmp_path / "q")
    with caplog.at_level(logging.INFO):
        model = loaded(path)
    reference: Any = AutoModelForCausalLM.from_pretrained(path / "exact", dtype=torch.float32).eval()
    module, plain = (one.model.layers[0].mlp.experts for one in (model, reference))
    assert plain.down_proj_bias.abs().min() > 0
    assert not is_experts(module), "adapters of them are refused as on a CPU"
    assert not is_experts(plain)
    for name in ("gate_up_proj", "down_proj"):
        kept, meant = getattr(module, name), getattr(plain, name)
        assert isinstance(kept, GroupedExperts)
        assert (kept.scales.dtype, kept.shape) == (torch.uint8, meant.shape)
        assert all(torch.equal(kept[expert], meant[expert]) for expert in range(4))
    said = "2 weights stay of experts in four bits with groups of 32, scales of powers of two, a table"
    assert said in caplog.text
    assert "0 are decoded to torch.float32, 0.00 GB" in caplog.text
    tokens = verify.tokens(model.config, CPU)
    with torch.inference_mode():
        error = verify.median_error(verify.eager_logits(model, tokens), verify.eager_logits(reference, tokens))
    assert error < 1e-4


def test_experts_that_are_multiplied_wrongly_are_decoded(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = tiny_model("qwen3_moe", tmp_path_factory.getbasetemp(), **SIZES)
    path = quantize_checkpoint(source, tmp_path / "q", FORMATS["awq"])
    product = grouped_experts_kernel.multiply_experts
    monkeypatch.setattr(grouped_experts_kernel, "multiply_experts", lambda *given: product(*given) * 1.5)
    with caplog.at_level(logging.INFO, gpu_weights.__name__):
        model = loaded(path)
    assert "2 weights of experts in four bits with groups of 32, float16 scales, zeros are decoded" in caplog.text
    assert "with experts are wrong by" in caplog.text
    assert isinstance(model.model.layers[0].mlp.experts.down_proj, Tensor)


@pytest.mark.parametrize("is_known", [True, False])
def test_experts_with_a_decoded_projection_are_decoded(
    is_known: bool,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The other projection is of no kind, or of one that fails. None is said to stay before both are known."""
    source = tiny_model("qwen3_moe", tmp_path_factory.getbasetemp(), **SIZES)
    path = quantize_checkpoint(source, tmp_path / "q", FORMATS["awq"])
    unsupported = gpu_weights._unsupported
    inner = SIZES["moe_intermediate_size"]

    def other_kind(weight: Any, *rest: Any) -> Any:
        kind: Any = kind_of(weight, *rest)
        if not weight.experts or weight.shape[-1] != inner:
            return kind
        return replace(kind, dtype=torch.float64) if is_known else None

    def wrong(kind: Any, *rest: Any) -> str:
        return "it is wrong" if getattr(kind, "dtype", None) == torch.float64 else unsupported(kind, *rest)

    monkeypatch.setattr(gpu_weights, "kind_of", other_kind)
    monkeypatch.setattr(gpu_weights, "_unsupported", wrong)
    with caplog.at_level(logging.INFO, gpu_weights.__name__):
        model = loaded(path)
    assert not any(isinstance(module, ExpertStack) for module in model.modules())
    said = [record.getMessage() for record in caplog.records if "of experts" in record.getMessage()]
    assert not any("stay" in line for line in said)
    assert sum("since down_proj of the same experts is decoded" in line for line in said) == 1
    assert sum("since it is wrong" in line for line in said) == int(is_known)


def test_slower_experts_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only products are timed, of as many experts as the model has."""
    left = iter((1.0, 1.0, 3.0, 1.0))
    routed: list[tuple[int, ...]] = []

    def routing(chosen: Tensor, experts: int) -> Any:
        routed.append((*chosen.shape, experts))
        return route(chosen, experts)

    def milliseconds(call: Any) -> float:
        before = len(routed)
        assert call().shape[1] == 32
        assert len(routed) == before
        return next(left)

    def stack() -> ExpertStack:
        return stack_of([[grouped_layer(32, 64, 32, ZEROS)] for _ in range(8)], torch.bfloat16)

    monkeypatch.setattr(experts_trial, "route", routing)
    monkeypatch.setattr(timing, "milliseconds", milliseconds)
    said = experts_trial.slower(stack, 2, CPU, torch.bfloat16)
    assert said == "a product of 16 tokens takes 3 ms, and 1 ms with a decoded weight"
    assert routed == [(1, 2, 8), (16, 2, 8)]


def test_modules_that_compute_more_are_left_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    _, module = experts_module(tmp_path_factory.getbasetemp())
    assert takes(module)
    assert not takes(torch.nn.Linear(2, 2))
    module.has_bias = True
    assert not takes(module), "it has no biases"
    module.has_bias = False
    module.has_post_expert_norm = True
    assert not takes(module)
