"""Layers of four bits: kernels interpreted on a CPU, beside float64 products of the numbers that the codes mean."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from model_worker.cuda import grouped_trial, product_tiles, timing
from model_worker.cuda.grouped_linear import (
    MIDDLE,
    OFFSETS,
    TABLE,
    ZEROS,
    GroupedLinear,
    exponents_of,
    numbers_of,
    pack,
    step_of,
)
from model_worker.cuda.joined_linear import JoinedLinear
from model_worker.loading import gpu_weights, verify
from model_worker.loading.gguf import load as gguf_load
from model_worker.loading.gguf.load import gguf_config, load_gguf
from model_worker.loading.gpu_weights import kept_on_gpu
from model_worker.loading.prepare import prepare
from shared.gguf.file import open_gguf
from tests.gguf_models import random_model, write_model
from tests.model_worker.cuda.in_four_bits import E2M1, IQ4, grouped_layer, in_table
from tests.model_worker.cuda.interpreter import need_triton
from tests.model_worker.cuda.on_gpu import loaded, shorten_trials
from tests.model_worker.loading.quantized_checkpoints import FORMATS, quantize_checkpoint
from tests.model_worker.tiny_models import tiny_model

need_triton()

from model_worker.cuda import grouped_kernel  # noqa: E402

CPU = torch.device("cpu")
KINDS = (MIDDLE, ZEROS, OFFSETS)
# In pieces, of which the last is shorter; 130 outputs are no whole number of tiles.
LONG = 32 * 49
OUTPUTS = 130


def error_of(linear: GroupedLinear, x: Tensor) -> float:
    bias = None if linear.bias is None else linear.bias.double()
    want = torch.nn.functional.linear(x.double(), linear.weight.double(), bias)
    got = linear(x)
    assert (got.dtype, got.shape) == (x.dtype, want.shape)
    assert not linear.arrived.any(), "counters are zero again"
    return float((got.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("inputs", "group"), [(LONG, 32), (64 * 20, 64), (1152, 128), (96 * 12, 96), (1280, 256), (1536, 1536), (64, 64)]
)
def test_a_product_is_that_of_the_numbers_meant(kind: int, inputs: int, group: int) -> None:
    linear = grouped_layer(OUTPUTS, inputs, group, kind)
    # A tile of each kind.
    for tokens in (1, 19, 40, 67):
        assert error_of(linear, torch.randn(tokens, inputs) * torch.randn(inputs).exp()) < 2e-6


@pytest.mark.parametrize("powers", [True, False])
def test_codes_may_have_a_table(powers: bool) -> None:
    """All sixteen numbers, with scales that are numbers, or powers of two from the least to the largest."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(4)[None].repeat(3, 1)
    of_powers = torch.tensor([[1, 127], [127, 240], [100, 100]], dtype=torch.uint8)
    scales = of_powers if powers else torch.rand(3, 2).half()
    linear = in_table(pack(codes, 2), scales, E2M1 if powers else IQ4)
    sizes = torch.exp2(of_powers.double() - 127) if powers else scales.double()
    want = torch.tensor(E2M1 if powers else IQ4).repeat(4).double() * sizes.repeat_interleave(32, 1)
    assert torch.equal(linear.weight.double(), want)
    # Each input alone.
    assert torch.equal(linear(torch.eye(64)).double(), want.T)
    assert error_of(grouped_layer(OUTPUTS, 640, 64, TABLE), torch.randn(19, 640)) < 2e-6


def test_scales_of_powers_of_two_are_told() -> None:
    scales = torch.tensor([2.0**-126, 0.5, 1, 2.0**127])
    powers = exponents_of(scales)
    assert powers is not None
    assert powers.tolist() == [1, 126, 127, 254]
    assert torch.equal(numbers_of(powers), scales)
    for other in (0.0, -1.0, 3.0, 2.0**-127, torch.inf, torch.nan):
        assert exponents_of(torch.tensor([1.0, other])) is None


@pytest.mark.parametrize("kind", KINDS)
def test_codes_may_have_eight_bits(kind: int) -> None:
    linear = grouped_layer(OUTPUTS, 1152, 128, kind, ordered=True, biased=True, bits=8)
    for tokens in (1, 40):
        x = torch.randn(tokens, 1152) * torch.randn(1152).exp()
        assert error_of(linear, x) < 2e-6
        # In which numbers of nine bits are whole.
        assert error_of(linear, x.half()) < 1e-3
    assert torch.equal(linear(torch.eye(1152)[:3]), linear.weight.T[:3] + linear.get_parameter("bias"))


@pytest.mark.parametrize("outputs", [1, 63, 64, 200])
@pytest.mark.parametrize("biased", [False, True])
def test_outputs_need_not_fill_tiles(outputs: int, biased: bool) -> None:
    linear = grouped_layer(outputs, 1024, 64, ZEROS, ordered=True, biased=biased)
    assert error_of(linear, torch.randn(2, 5, 1024)) < 2e-6
    assert error_of(linear, torch.randn(5, 1024).half()) < 1e-3


def test_tokens_do_not_depend_on_those_beside_them() -> None:
    """Sums are cut at the same places, and parts are added in their order, however many tokens there are."""
    linear = grouped_layer(OUTPUTS, LONG, 32, ZEROS)
    pieces, of_piece = product_tiles.pieces_of(OUTPUTS, LONG, 32)
    assert pieces > 2
    assert pieces * of_piece > LONG // 32, "the last piece is shorter"
    x = torch.randn(40, LONG)
    alone = torch.cat([linear(row[None]) for row in x[:4]])
    for tokens in (*range(4, 17, 4), 17, 32, 33, 40):
        assert torch.equal(linear(x[:tokens])[:4], alone)
    x[1] = torch.nan
    assert torch.equal(linear(x)[[0, 2, 3]], alone[[0, 2, 3]])


def test_counters_are_enough() -> None:
    """A weight with as many tiles of outputs as there are counters is not cut."""
    linear = grouped_layer(1, 32, 32, MIDDLE)
    assert len(linear.arrived) == product_tiles.PROGRAMS
    for outputs in range(64, 64 * 300, 64):
        pieces, _ = product_tiles.pieces_of(outputs, 1 << 15, 128)
        assert pieces == 1 or -(-outputs // 64) <= len(linear.arrived)


def test_codes_are_packed_in_steps() -> None:
    codes = torch.randint(0, 16, (3, 192), dtype=torch.uint8)
    packed = pack(codes, 2)
    assert step_of(96) == 32
    assert packed[2, 16 * 4 + 5] == codes[2, 32 * 4 + 5] + 16 * codes[2, 32 * 4 + 21]
    assert [step_of(group) for group in (16, 32, 48, 64, 128, 384, 4096, 40)] == [0, 32, 0, 64, 128, 128, 128, 0]


def test_layers_of_the_same_input_are_one_product() -> None:
    for kind in (*KINDS, TABLE):
        # In pieces.
        parts = [grouped_layer(outputs, 1024, 64, kind, biased=True) for outputs in (48, 16, 40)]
        x = torch.randn(7, 1024)
        want = torch.cat([part(x) for part in parts], -1)
        joined = JoinedLinear(parts)
        assert len(joined._products) == 1
        torch.testing.assert_close(joined(x), want)
        assert not any(part.arrived.any() for part in parts), "counters are zero again"
        torch.testing.assert_close(torch.cat([part(x) for part in parts], -1), want)
        assert not any(part.arrived.any() for part in parts)


def test_layers_that_do_not_go_together_are_several_products() -> None:
    order = torch.randperm(128).int()
    alike = [grouped_layer(40, 128, 32, ZEROS), grouped_layer(24, 128, 32, ZEROS)]
    for one in alike:
        one.order = order
    plain = torch.nn.Linear(128, 24, bias=False).requires_grad_(False)
    others = [plain, grouped_layer(24, 128, 32, ZEROS, ordered=True), grouped_layer(24, 128, 64, ZEROS)]
    parts = [*alike, *others, grouped_layer(24, 128, 64, MIDDLE)]
    x = torch.randn(3, 128)
    want = torch.cat([part(x) for part in parts], -1)
    joined = JoinedLinear(parts)
    assert len(joined._products) == 5
    torch.testing.assert_close(joined(x), want)


def test_a_card_is_kept_busy() -> None:
    """With few large tiles, smaller ones are taken, and as few of these are cut into pieces."""
    processors, pieces = 132, 4
    found = {
        count: product_tiles.tile_of(count, 4096, pieces, processors)
        for count in (1, 17, 64, 128, 192, 512, 1024, 4096)
    }
    sizes = {count: (tile.rows, tile.columns, tile.is_split) for count, tile in found.items()}
    assert sizes == {
        1: (16, 64, True),
        17: (32, 64, True),
        64: (64, 64, True),
        128: (64, 64, True),
        192: (64, 64, False),
        512: (64, 64, False),
        1024: (128, 128, False),
        4096: (128, 128, False),
    }
    assert not product_tiles.tile_of(128, 4096, 1, processors).is_split, "there is one piece"
    for count in range(1, 2000, 50):
        for outputs in range(64, 64 * 300, 192):
            pieces, _ = product_tiles.pieces_of(outputs, 1 << 15, 128)
            tile = product_tiles.tile_of(count, outputs, pieces, 304)
            assert not tile.is_split or tile.programs(count, outputs) <= product_tiles.PROGRAMS


def test_large_tiles_fit_cards_with_little_shared_memory() -> None:
    """An H100, an A100, cards for one desk (99 KiB), and AMD's (64 KiB)."""
    shared = (227 << 10, 163 << 10, 99 << 10, 64 << 10)
    large = product_tiles.TILES[-1]
    for bits, stages in ((4, [3, 3, 3, 2]), (8, [3, 3, 2, 2])):
        assert [product_tiles.stages_of(large, 128, bits, 2, size) for size in shared] == stages
    assert all(product_tiles.stages_of(tile, 128, 8, 2, 99 << 10) == 4 for tile in product_tiles.TILES[:2])


def test_tokens_of_smaller_tiles_are_those_of_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = grouped_layer(OUTPUTS, 1024, 64, ZEROS)
    x = torch.randn(70, 1024)
    found = []
    for processors in (1, 4, 132):
        monkeypatch.setattr(grouped_kernel, "processors_of", lambda _, processors=processors: processors)
        found.append(linear(x))
    tiles = {product_tiles.tile_of(70, OUTPUTS, 2, processors)[1:] for processors in (1, 4, 132)}
    assert len(tiles) == 3
    want = x.double() @ linear.weight.double().T
    assert float((found[0].double() - want).abs().max() / want.abs().max()) < 2e-6
    torch.testing.assert_close(found[1], found[0])
    assert torch.equal(found[1], found[2]), "pieces are added up in their order"
    assert not linear.arrived.any()


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_have_no_products(kind: int) -> None:
    assert grouped_layer(40, 128, 32, kind)(torch.empty(0, 128)).shape == (0, 40)


@pytest.fixture
def small_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_trials(monkeypatch)


@pytest.mark.parametrize(("kind", "dtype"), [(MIDDLE, torch.float32), (ZEROS, torch.float16), (OFFSETS, torch.float16)])
def test_this_machine_multiplies_them(kind: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_trial, "_TRIAL_TOKENS", (1, 17, 40, 130))
    assert grouped_trial.unsupported(grouped_layer(70, 1024, 128, kind, ordered=True), CPU, dtype) == ""


@pytest.mark.usefixtures("small_trials")
def test_what_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    product = grouped_kernel.multiply
    linear = grouped_layer(70, 256, 64, ZEROS, ordered=True)

    def missing(*_: Any) -> Tensor:
        raise RuntimeError("no compiler here\nbacktrace")

    monkeypatch.setattr(grouped_kernel, "multiply", missing)
    assert grouped_trial.unsupported(linear, CPU, torch.float32) == "no compiler here"
    for wrong in (
        lambda x, packed, *rest: product(x, packed._replace(scales=packed.scales.flip(1)), *rest),
        lambda x, packed, *rest: product(x, packed._replace(zeros=packed.zeros.roll(1, 0)), *rest),
        lambda x, *rest: product(x.roll(1, 1), *rest),
        lambda x, *rest: product(x, *rest).roll(1, 0) if len(x) > 16 else product(x, *rest),
        lambda x, *rest: product(x, *rest) * torch.nan,
    ):
        monkeypatch.setattr(grouped_kernel, "multiply", wrong)
        assert "wrong by" in grouped_trial.unsupported(linear, CPU, torch.float32)
    monkeypatch.setattr(grouped_kernel, "multiply", lambda x, *rest: product(x, *rest) * (1 + len(x) % 2 * 1e-4))
    assert "depend on those beside them" in grouped_trial.unsupported(linear, CPU, torch.float32)
    calls = iter(range(100))
    monkeypatch.setattr(grouped_kernel, "multiply", lambda *given: product(*given) + 1e-4 * next(calls))
    assert "not the same each time" in grouped_trial.unsupported(linear, CPU, torch.float32)


def test_a_slower_product_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are those of products in four bits and of decoded weights, by turns."""

    def trial(*times: float) -> str:
        left = iter(times)

        def milliseconds(call: Callable[[], Tensor]) -> float:
            assert call().shape[1] == 32
            return next(left)

        monkeypatch.setattr(timing, "milliseconds", milliseconds)
        return grouped_trial.slower(lambda: grouped_layer(32, 64, 32, OFFSETS), (32, 64), CPU, torch.float32)

    assert trial(1.0, 4.0, 1.0, 4.0, 4.1, 4.0, 4.0, 4.0, 4.0, 4.0) == ""
    assert trial(*[4.0] * 8, 5.0, 4.0) == "a product of 1024 tokens takes 5 ms, and 4 ms with a decoded weight"
    assert trial(1.0, 4.0, 5.0, 4.0) == "a product of 16 tokens takes 5 ms, and 4 ms with a decoded weight"
    assert trial() == "its products cannot be timed: generator raised StopIteration"


SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
OF_FOUR_BITS = (
    "gptq",
    "gptq in order of activations",
    "gptq in one order",
    "awq",
    "w4a16",
    "w4a16 with zeros",
    "w4a16 in order of activations",
    "mxfp4 of compressed-tensors",
    "gptq 3 bits",
)
OF_EIGHT_BITS = ("gptq 8 bits", "w8a16", "w8a8")
# Of scales, where they are not of 16 bits.
SCALE_BYTES = {"mxfp4 of compressed-tensors": 1, "w8a8": 4}


def error_of_model(model: Any, reference: Any) -> float:
    tokens = verify.tokens(model.config, CPU)
    with torch.inference_mode():
        return verify.median_error(verify.eager_logits(model, tokens), verify.eager_logits(reference, tokens))


@pytest.mark.parametrize("name", [*OF_FOUR_BITS, *OF_EIGHT_BITS, "nvfp4"])
def test_a_checkpoint_keeps_its_codes(
    name: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others are decoded."""
    source = tiny_model("llama", tmp_path_factory.getbasetemp(), **SIZES, num_hidden_layers=1)
    path = quantize_checkpoint(source, tmp_path / "q", FORMATS[name])
    with caplog.at_level(logging.INFO):
        model = loaded(path)
    reference = AutoModelForCausalLM.from_pretrained(path / "exact", dtype=torch.float32).eval()
    kept = {key: module for key, module in model.named_modules() if isinstance(module, GroupedLinear)}
    assert len(kept) == (0 if name == "nvfp4" else 7)
    for key, module in kept.items():
        assert torch.equal(module.weight, reference.get_submodule(key).weight)
        assert module.scales.itemsize == SCALE_BYTES.get(name, 2), "scales are as narrow as the file's"
        assert module.coding.bits == (4 if name in OF_FOUR_BITS else 8)
    if kept:
        said = "four bits with groups of 32, " if name in OF_FOUR_BITS else "eight bits with groups of "
        assert f" weights stay in {said}" in caplog.text
        assert "0 are decoded to torch.float32, 0.00 GB" in caplog.text
    assert error_of_model(model, reference) < 1e-4
    served = prepare(model, CPU, "none", lambda *_: None, has_kernels=lambda *_: False)
    assert served.parameter_count >= sum(parameter.numel() for parameter in reference.parameters())
    assert served.attention_name == "reference"


def test_a_card_that_computes_them_wrongly_gets_decoded_weights(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = tiny_model("llama", tmp_path_factory.getbasetemp(), **SIZES, num_hidden_layers=1)
    path = quantize_checkpoint(source, tmp_path / "q", FORMATS["awq"])
    product = grouped_kernel.multiply
    monkeypatch.setattr(grouped_kernel, "multiply", lambda *given: product(*given) * 1.5)
    with caplog.at_level(logging.INFO, gpu_weights.__name__):
        model = loaded(path)
    said = "groups of 32, float16 scales, zeros are decoded, which takes 0.00 GB, since products of 1 tokens are"
    assert said in caplog.text
    reference = AutoModelForCausalLM.from_pretrained(path / "exact", dtype=torch.float32).eval()
    assert error_of_model(model, reference) < 1e-4


@pytest.mark.usefixtures("small_trials")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q8_0", "Q6_K"])
def test_a_gguf_file_keeps_its_codes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of six bits are decoded: groups of 16 inputs are too few."""
    size = 256 if kind.endswith("K") else 64
    sizes = {"hidden_size": size, "intermediate_size": size, "vocab_size": 270, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": size // 4}
    model = random_model("llama", sizes)
    path = tmp_path / "model.gguf"
    exact: Any = write_model(path, model, "llama", kind)

    def kept(given: Any, skeleton: Any, _: torch.device, *rest: Any, **named: Any) -> Any:
        return kept_on_gpu(given, skeleton, CPU, *rest, **named)

    monkeypatch.setattr(gguf_load, "kept_on_gpu", kept)
    file = open_gguf(path)
    found: Any = load_gguf(file, gguf_config(file), "Llama", torch.float32, torch.device("cuda"))
    fours = [module for module in found.modules() if isinstance(module, GroupedLinear)]
    assert len(fours) == (0 if kind == "Q6_K" else 8)
    assert {module.coding.bits for module in fours} == ({8} if kind == "Q8_0" else {4} if fours else set())
    assert error_of_model(found.eval(), exact.eval()) < 1e-4
