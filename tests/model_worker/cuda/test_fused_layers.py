"""Fused layers, with kernels interpreted on the CPU, give what transformers' modules give, in ten launches each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from model_worker.backends import fused_layers
from model_worker.backends.fused_layers import FusedLayers
from model_worker.batch import ForwardBatch
from model_worker.cuda.fp8_blocks import SIDE, BlockFp8Linear
from model_worker.cuda.fp8_linear import Fp8Linear
from model_worker.loading import verify
from model_worker.loading.gpu_layers import check_steps, fuse_layers
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel, ModelRefused
from model_worker.runner import ModelRunner
from model_worker.weights.serving import free_weights
from tests.model_worker.cuda.in_four_bits import in_four_bits
from tests.model_worker.cuda.interpreter import need_triton
from tests.model_worker.tiny_models import VOCAB, tiny_model

need_triton()

from model_worker.cuda import gate_kernel, norm_kernel, rotary_kernel  # noqa: E402

# Each has something that those before it have not: norms of heads, biases, joined projections, soft caps, four norms
# and two kinds of angles.
FUSED = ("llama", "qwen3", "qwen2", "phi3", "gemma2", "gemma3_text")
SIZE = 16


def load(family: str, folder: Path, dtype: str = "float32", **overrides: Any) -> LoadedModel:
    """Load a model as for a GPU with Triton's attention: its linear modules stay plain."""
    loaded = load_model(
        tiny_model(family, folder, **overrides), dtype, "cpu", lambda *_: None, has_kernels=lambda *_: False
    )
    return replace(loaded, attention_name="triton", has_kernels=True)


def with_layers(loaded: LoadedModel) -> LoadedModel:
    return replace(loaded, layers=FusedLayers(loaded))


def proven(loaded: LoadedModel) -> LoadedModel:
    """Do what loading does on a GPU."""
    tokens = verify.tokens(loaded.model.config, loaded.device)
    with torch.inference_mode():
        expected = verify.eager_logits(loaded.model, tokens)
    return fuse_layers(loaded, tokens, expected)


def step(rng: np.random.Generator, queries: list[int], pasts: list[int], wanted: list[int]) -> ForwardBatch:
    lengths = np.array(queries, np.int64) + np.array(pasts, np.int64)
    width = 4
    tables = np.arange(len(queries) * width)[::-1].reshape(len(queries), width)
    tokens = rng.integers(3, VOCAB, sum(queries))
    return ForwardBatch.build(tokens, np.array(queries, np.int64), lengths, tables, SIZE, np.array(wanted, np.int64))


@pytest.mark.parametrize("family", FUSED)
def test_a_model_gives_the_logits_of_its_modules(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    loaded = load(family, tmp_path_factory.getbasetemp())
    layers, modules = ModelRunner(with_layers(loaded), 12, SIZE), ModelRunner(loaded, 12, SIZE, "reference")
    assert layers.description == "fused layers, triton attention"
    assert modules.description == "transformers' modules, reference attention"
    rng = np.random.default_rng()
    first = step(rng, [13, 1, 5], [0, 0, 0], [12, 3, 18])
    torch.testing.assert_close(layers.backend.logits(first), modules.backend.logits(first), rtol=1e-3, atol=1e-4)
    second = step(rng, [1, 4, 1], [13, 1, 5], [0, 2, 5])
    (got, states), (want, expected) = (runner.backend.hidden(second) for runner in (layers, modules))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(states, expected, rtol=1e-3, atol=1e-4)
    for one, other in zip(layers.cache.k + layers.cache.v, modules.cache.k + modules.cache.v, strict=True):
        torch.testing.assert_close(one[:12], other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_weights_in_fp8_are_joined_too(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rounding differs where queries, keys and values differ by a bit, so models are compared as a whole."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16} if family != "phi3" else {}
    loaded = load(family, tmp_path_factory.getbasetemp(), seed=7, **sizes)
    make_encoded(loaded, in_fp8)
    assert error_of_layers(loaded) < 0.05


def test_weights_in_fp8_with_scales_of_blocks_are_joined_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    sizes: dict[str, Any] = {"hidden_size": 144, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
    folder = tmp_path_factory.getbasetemp()
    loaded = load("qwen3", folder, seed=7, **sizes, num_key_value_heads=2, num_hidden_layers=1)
    make_encoded(loaded, in_blocks)
    assert error_of_layers(loaded) < 0.05
    crossing = load("qwen3", folder, seed=7, **{**sizes, "head_dim": 48}, num_key_value_heads=2, num_hidden_layers=1)
    make_encoded(crossing, in_blocks)
    # A block would have outputs of two layers: these are several products.
    assert error_of_layers(crossing) < 0.05


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_weights_of_four_bits_are_joined_too(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    loaded = load(family, tmp_path_factory.getbasetemp(), seed=7, **sizes)
    make_encoded(loaded, in_four_bits)
    assert error_of_layers(loaded) < 1e-4


def test_weights_of_several_kinds_lie_in_one_layer(tmp_path_factory: pytest.TempPathFactory) -> None:
    """As in a GGUF file, where values have more bits than queries and keys."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    loaded = load("llama", tmp_path_factory.getbasetemp(), seed=7, **sizes)
    make_encoded(loaded, in_four_bits, but=("v_proj", "down_proj"))
    assert error_of_layers(loaded) < 1e-4


def error_of_layers(loaded: LoadedModel) -> float:
    layers, modules = ModelRunner(with_layers(loaded), 12, SIZE), ModelRunner(loaded, 12, SIZE, "reference")
    batch = step(np.random.default_rng(), [13, 1, 5], [0, 0, 0], [12, 13, 18])
    return verify.median_error(layers.backend.logits(batch), modules.backend.logits(batch))


def make_encoded(loaded: LoadedModel, convert: Callable[[nn.Linear], nn.Module], but: tuple[str, ...] = ()) -> None:
    """Convert the linear modules of attention and of gated layers."""
    gated = [module for module in loaded.model.modules() if type(module).__name__.endswith("MLP")]
    for block in [*loaded.attention.layer_of, *gated]:
        for name, linear in list(block.named_children()):
            if isinstance(linear, nn.Linear) and name not in but:
                setattr(block, name, convert(linear))


def in_fp8(linear: nn.Linear) -> Fp8Linear:
    scales = linear.weight.detach().abs().amax(1) / 448
    return Fp8Linear((linear.weight.detach() / scales[:, None]).to(torch.float8_e4m3fn), scales, linear.bias)


def in_blocks(linear: nn.Linear) -> BlockFp8Linear:
    weight = linear.weight.detach()
    blocks = -(-weight.shape[0] // SIDE), -(-weight.shape[1] // SIDE)
    scales = (0.5 + torch.rand(blocks)) * float(weight.abs().max()) / 200
    along = scales.repeat_interleave(SIDE, 0)[: weight.shape[0]].repeat_interleave(SIDE, 1)[:, : weight.shape[1]]
    return BlockFp8Linear((weight / along).to(torch.float8_e4m3fn), scales, linear.bias)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt2", "its decoder is not built like Llama's or Gemma's"),
        ("olmo2", "its layers are not built like Llama's or Gemma's"),
        ("granite", "not built like Llama's or Gemma's"),
        ("qwen3_moe", "its decoder is not built like Llama's or Gemma's"),
    ],
)
def test_another_form_keeps_its_modules(
    family: str, reason: str, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "model_worker.loading.gpu_layers"):
        loaded = proven(load(family, tmp_path_factory.getbasetemp()))
    assert loaded.layers is None
    (line,) = [record.getMessage() for record in caplog.records if "not by fused layers" in record.msg]
    assert line.startswith(loaded.architecture)
    assert reason in line


def test_layers_with_other_logits_are_not_used(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load("llama", tmp_path_factory.getbasetemp(), num_hidden_layers=1)
    monkeypatch.setattr(fused_layers, "_activation", lambda _: gate_kernel.GELU_TANH)
    assert proven(loaded).layers is None
    assert "gives other logits" in caplog.text


def test_layers_are_proven_and_a_decode_step_is_compared_too(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = proven(load("mistral", tmp_path_factory.getbasetemp(), num_hidden_layers=1))
    assert loaded.layers is not None
    whole = rotary_kernel.rotate_and_write

    def forgets(rows: Tensor, *arguments: Any) -> Tensor:
        queries = whole(rows, *arguments)
        return queries * 0.5 if len(rows) == 2 else queries

    monkeypatch.setattr(rotary_kernel, "rotate_and_write", forgets)
    with pytest.raises(ModelRefused, match="a decode step"):
        check_steps(loaded)


def test_weights_are_those_of_the_modules(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A new value of a module's weight counts, and weights that are taken away leave nothing behind."""
    loaded = with_layers(load("llama", tmp_path_factory.getbasetemp(), seed=5))
    runner = ModelRunner(loaded, 8, SIZE)
    batch = step(np.random.default_rng(), [9], [0], [8])
    before = runner.backend.logits(batch).clone()
    attention: Any = next(iter(loaded.attention.layer_of))
    with torch.no_grad():
        attention.k_proj.weight.neg_()
    after = runner.backend.logits(batch).clone()
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, ModelRunner(replace(loaded, layers=None), 8, SIZE).backend.logits(batch))
    whole = StorageWeakRef(attention.q_proj.weight.untyped_storage())
    assert whole.cdata == StorageWeakRef(attention.v_proj.weight.untyped_storage()).cdata, "they lie together"
    assert not whole.expired()
    free_weights(loaded)
    assert whole.expired()


@pytest.mark.parametrize("form", norm_kernel.FORMS)
@pytest.mark.parametrize(("width", "turning"), [(24, 24), (20, 8), (64, 64)])
def test_heads_are_normalised_turned_and_written(form: int, width: int, turning: int) -> None:
    tokens, q_heads, kv_heads, blocks = 5, 4, 2, 3
    rows = torch.randn(tokens, (q_heads + 2 * kv_heads) * width)
    k_cache, v_cache = torch.zeros(2, blocks, SIZE, kv_heads, width)
    angle = torch.randn(tokens, turning // 2)
    cos, sin = (torch.cat([part, part], 1) for part in (angle.cos(), angle.sin()))
    slots = torch.randperm(blocks * SIZE)[:tokens]
    weights = torch.randn(2, width)
    heads = rows.unflatten(1, (-1, width)).clone()

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        normed = norm_kernel.rms_norm(x.contiguous(), weight, 1e-6, form)
        first, second, rest = normed.split([turning // 2, turning // 2, width - turning], -1)
        half = torch.cat([-second, first], -1)
        return torch.cat([normed[..., :turning] * cos[:, None] + half * sin[:, None], rest], -1)

    pair = (weights[0], weights[1])
    got = rotary_kernel.rotate_and_write(rows, k_cache, v_cache, (cos, sin), slots, q_heads, pair, 1e-6, form)
    torch.testing.assert_close(got, turned(heads[:, :q_heads], weights[0]))
    written = k_cache.flatten(0, 1)[slots], v_cache.flatten(0, 1)[slots]
    torch.testing.assert_close(written[0], turned(heads[:, q_heads : q_heads + kv_heads], weights[1]))
    assert torch.equal(written[1], heads[:, q_heads + kv_heads :])
    assert int((k_cache != 0).any(-1).sum()) == tokens * kv_heads, "other slots are as they were"


# Without bfloat16, which Triton's interpreter truncates where a GPU rounds.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", norm_kernel.FORMS)
@pytest.mark.parametrize("inner", [False, True])
def test_sums_are_normalised(dtype: torch.dtype, form: int, inner: bool) -> None:
    total, x = torch.randn(2, 3, 100).to(dtype)
    weight, own = torch.randn(2, 100).to(dtype)
    added = norm_kernel.rms_norm(x, own, 1e-5, form) if inner else x
    want = total + added
    got = norm_kernel.add_norm(total, x, own if inner else None, weight, 1e-5, form)
    assert torch.equal(total, want)
    torch.testing.assert_close(got, norm_kernel.rms_norm(want, weight, 1e-5, form))


def test_gates_may_be_columns_of_a_wider_tensor() -> None:
    both = torch.randn(3, 2 * 1100)
    gate, up = both.chunk(2, 1)
    got = gate_kernel.gated(gate, up, gate_kernel.SILU)
    torch.testing.assert_close(got, nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-5)
