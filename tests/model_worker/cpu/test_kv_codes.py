"""K and V in 8 bits: codes and scales one by one, and the fused stack beside plain torch on the same cache."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from model_worker.attention import coded, cpu, reference
from model_worker.attention.coded import CodedCache
from model_worker.backends.modules import ModulesBackend
from model_worker.batch import ForwardBatch
from model_worker.cpu.simd.kv_codes import FP8, INT8, encode_token, widen_keys, widen_values
from model_worker.kv_cache import CODE_DTYPES, AttentionParams, KVCache, KVLayout, LayerShape
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel, ModelRefused
from model_worker.runner import ModelRunner
from tests.model_worker.cpu.test_fused_stack import batches, logits, relative
from tests.model_worker.tiny_models import VOCAB, tiny_model

KINDS = {"int8": INT8, "fp8": FP8}
NAMES = list(KINDS)
BLOCK_SIZE = 16


def load(arch: str, dtype: str, folder: Path, kv_dtype: str, **options: Any) -> LoadedModel:
    return load_model(tiny_model(arch, folder), dtype, "cpu", lambda *_: None, kv_dtype=kv_dtype, **options)


@njit
def _encode(kind: int, values: Any, to: Any, scale: Any) -> None:
    encode_token(kind, values, to.ctypes.data, 2, 1, scale.ctypes.data)


@njit
def _widen(kind: int, codes: Any, keys: Any, values: Any) -> None:
    widen_keys(kind, 1, codes.ctypes.data, 16, 0, keys)
    widen_values(kind, 1, codes.ctypes.data, 0, values)


def naive_codes(values: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return codes as numbers, and their scale, of one token: the nearest number that there is."""
    numbers = torch.arange(256, dtype=torch.uint8).view(CODE_DTYPES[name]).double()
    numbers = numbers[numbers.isfinite() & (numbers.abs() <= coded.LARGEST_CODE[CODE_DTYPES[name]])].unique()
    scale = values.abs().max().double() / coded.LARGEST_CODE[CODE_DTYPES[name]]
    return numbers, scale


@pytest.mark.parametrize("name", NAMES)
def test_a_code_is_the_nearest_number_that_there_is(name: str) -> None:
    for values in (
        torch.randn(64),
        torch.randn(64) * torch.logspace(-9, 3, 64),
        torch.zeros(64),
        torch.randn(64) / 1e35,
    ):
        codes, scale = coded.encode(values, CODE_DTYPES[name])
        got = coded.decode(codes, scale, CODE_DTYPES[name]).double()
        if float(values.abs().max()) < coded.NOTHING:
            assert not got.any()
            continue
        numbers, exact = naive_codes(values, name)
        nearest = (values.double()[:, None] - exact * numbers).abs().amin(1)
        # The scale is a float32, and so is its inverse: twice half a unit in the last place of the largest number.
        assert ((values.double() - got).abs() <= nearest + 2.0**-22 * values.abs().max()).all()


@pytest.mark.parametrize("name", NAMES)
def test_compiled_code_writes_the_codes_of_plain_torch(name: str) -> None:
    rows = [torch.randn(48), torch.randn(48) * torch.logspace(-9, 3, 48), torch.zeros(48), torch.randn(48) / 1e35]
    rows += [torch.tensor([bad, *[1.0] * 47]) for bad in (torch.inf, -torch.inf, torch.nan)]
    for values in rows:
        want, scale = coded.encode(values, CODE_DTYPES[name])
        to = np.full(48, 77, np.uint8)
        got = np.full(1, 5, np.float32)
        _encode(KINDS[name], values.numpy(), to, got)
        assert np.array_equal(got, [scale.numpy()], equal_nan=True)
        assert bool(torch.isfinite(values).all()) == bool(np.isfinite(got[0]))
        if np.isfinite(got[0]):
            assert torch.equal(
                torch.from_numpy(to).view(CODE_DTYPES[name]).float(), want.view(CODE_DTYPES[name]).float()
            )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("element", [np.float32, np.uint16])
def test_every_code_is_widened_to_its_number(name: str, element: type) -> None:
    """A group of 16 tokens with 16 elements has each of 256 codes once."""
    codes = np.random.default_rng().permutation(256).astype(np.uint8)
    numbers = torch.from_numpy(codes.copy()).view(CODE_DTYPES[name]).float().numpy()
    keys: NDArray[Any] = np.zeros(64 * 16, element)
    values: NDArray[Any] = np.zeros(64 * 16, element)
    _widen(KINDS[name], codes, keys, values)

    def floats(words: Any) -> Any:
        return words if element is np.float32 else (words.astype(np.uint32) << 16).view(np.float32)

    part = 4 // np.dtype(element).itemsize
    # [element step, token of a panel, part] and [group, token step, element, part]
    got_keys = floats(keys).reshape(16 // part, 64, part)[:, 16:32].transpose(1, 0, 2).reshape(16, 16)
    got_values = floats(values).reshape(4, 16 // part, 16, part)[1].transpose(0, 2, 1).reshape(16, 16)
    of_key = numbers.reshape(8, 16, 2).transpose(1, 0, 2).reshape(16, 16)
    of_value = numbers.reshape(8, 16, 2).transpose(0, 2, 1).reshape(16, 16)
    for got, want in ((got_keys, of_key), (got_values, of_value)):
        there = np.isfinite(want)  # e4m3 has two codes for no number, which are never written
        assert np.array_equal(got[there], want[there])


@pytest.mark.parametrize("name", NAMES)
def test_plain_torch_attends_to_the_values_of_codes(name: str) -> None:
    rng = np.random.default_rng()
    plain = KVCache(KVLayout((LayerShape(2, 8, 6),), torch.float32), 12, 4, torch.device("cpu"))
    cache = CodedCache(KVCache(plain.layout.as_codes(name), 12, 4, torch.device("cpu")))
    lens, kv_lens = np.array([3, 1, 6]), np.array([3, 1, 6])
    tables = rng.permutation(12).astype(np.int32).reshape(3, 4)
    batch = ForwardBatch.build(rng.integers(0, 9, 10), lens, kv_lens, tables, 4, np.zeros(0, np.int64))
    k, v, q = torch.randn(10, 2, 8), torch.randn(10, 2, 6), torch.randn(10, 4, 8)
    cache.write(0, batch, k, v)
    dtype = CODE_DTYPES[name]
    plain.write(0, batch, *(coded.decode(*coded.encode(x, dtype), dtype) for x in (k, v)))
    params = AttentionParams(0.3)
    want = reference.attend(q, plain.k[0], plain.v[0], batch, params)
    assert torch.equal(coded.attend(q, cache.k[0], cache.v[0], batch, params), want)


@pytest.mark.parametrize("name", NAMES)
def test_half_the_memory_holds_the_tokens(name: str) -> None:
    layout = KVLayout((LayerShape(2, 64, 128),) * 3, torch.bfloat16)
    kept = layout.as_codes(name)
    assert (layout.bytes_per_token, kept.bytes_per_token) == (3 * 2 * 192 * 2, 3 * 2 * (192 + 8))
    assert kept.blocks_for(1 << 20, 16) == (1 << 20) // (16 * 1200)
    cache = KVCache(kept, 5, 16, torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in [*cache.k, *cache.v]) == cache.num_bytes == 5 * kept.bytes_per_block(16)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_float32_stack_gives_the_logits_of_plain_torch(name: str, arch: str, tmp_path_factory: Any) -> None:
    """Modules write the K and V of all but the last tokens, so that both read the same codes."""
    rng = np.random.default_rng()
    loaded = load(arch, "float32", tmp_path_factory.getbasetemp(), name)
    assert loaded.stack is not None
    assert loaded.row_invariant
    runner = ModelRunner(loaded, 32, BLOCK_SIZE)
    assert "fused stack, K and V in" in runner.description
    modules = ModulesBackend(loaded, runner.cache, cpu.attend)
    lengths = rng.integers(1, 120, 4)
    tables = rng.permutation(32).reshape(4, 8)
    texts = rng.integers(3, VOCAB, int(lengths.sum()))
    prompt = ForwardBatch.build(texts, lengths, lengths, tables, BLOCK_SIZE, np.arange(len(texts)))
    of_prompt = modules.logits(prompt).double()
    rows, ones = np.arange(4), np.ones(4, int)
    step = ForwardBatch.build(rng.integers(3, VOCAB, 4), ones, lengths + 1, tables, BLOCK_SIZE, rows)
    got = runner.backend.logits(step).double().clone()
    want = modules.logits(step).double()
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert float(errors.median()) < 3e-3
    # Numbers on the edge of two codes may be rounded otherwise, in the one token that both have written.
    assert float(errors.max()) < 0.2
    plain = ModelRunner(load(arch, "float32", tmp_path_factory.getbasetemp(), "auto"), 32, BLOCK_SIZE).backend
    exact = plain.logits(prompt).double()
    assert relative(of_prompt, exact) > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_the_first_layer_writes_the_codes_of_its_keys_and_values(name: str, tmp_path_factory: Any) -> None:
    steps = batches(np.random.default_rng(), BLOCK_SIZE, 32)
    folder = tmp_path_factory.getbasetemp()
    runner = ModelRunner(load("llama", "float32", folder, name), 32, BLOCK_SIZE)
    modules = ModelRunner(load("llama", "float32", folder, "auto"), 32, BLOCK_SIZE, "reference")
    for step in steps:
        runner.backend.logits(step)
        modules.backend.logits(step)
    cache = CodedCache(runner.cache)
    dtype = CODE_DTYPES[name]
    for kept, plain in ((cache.k[0], modules.cache.k[0]), (cache.v[0], modules.cache.v[0])):
        codes = kept.codes.flatten(3) if kept is cache.k[0] else kept.codes.flatten(1, 2)
        got = coded.decode(codes, kept.scales, dtype)
        wanted, scales = coded.encode(plain, dtype)
        # Within a code of each other, and nearly all of them the same.
        step_size = plain.abs().amax(-1, keepdim=True) / (127 if name == "int8" else 8)
        want = coded.decode(wanted, scales, dtype)
        assert ((got - want).abs() <= 1.01 * step_size).all()
        assert float(((got - want).abs() > 0.1 * step_size).float().mean()) < 0.01


@pytest.mark.parametrize("name", NAMES)
def test_what_an_earlier_sequence_left_in_a_block_does_not_matter(name: str, tmp_path_factory: Any) -> None:
    loaded = load("llama", "bfloat16", tmp_path_factory.getbasetemp(), name)
    steps = batches(np.random.default_rng(), BLOCK_SIZE, 32)
    clean, dirty = ModelRunner(loaded, 32, BLOCK_SIZE), ModelRunner(loaded, 32, BLOCK_SIZE)
    for blocks in dirty.cache.k + dirty.cache.v:
        blocks.fill_(255)  # scales and, among 8-bit floats, codes of no number
    assert torch.equal(logits(clean, steps), logits(dirty, steps))


def test_other_models_attend_in_plain_torch_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng()
    with caplog.at_level(logging.INFO):
        loaded = load("gemma2", "float32", tmp_path, "int8")
    assert "attends in plain torch, which is slow: K and V are in int8" in caplog.text
    assert "changes logits of random tokens by 0.0" in caplog.text
    steps = batches(rng, BLOCK_SIZE, 32)
    runner = ModelRunner(loaded, 32, BLOCK_SIZE)
    assert runner.description == "transformers' modules, reference attention, K and V in int8"
    plain = ModelRunner(load("gemma2", "float32", tmp_path, "auto"), 32, BLOCK_SIZE)
    assert relative(logits(runner, steps), logits(plain, steps)) > 1e-5


def test_without_kernels_plain_torch_reads_codes(tmp_path: Path) -> None:
    loaded = load("llama", "float32", tmp_path, "fp8", has_kernels=lambda *_: False)
    assert loaded.attention.layout.in_codes
    assert (loaded.stack, loaded.has_kernels) == (None, False)
    assert torch.isfinite(logits(ModelRunner(loaded, 32, BLOCK_SIZE), batches(np.random.default_rng(), 16, 32))).all()


def with_large_values(size: float, folder: Path) -> Path:
    """A model with one element of each V so large that codes keep little of the others, and nothing reads it."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(tiny_model("qwen2", folder))
    for layer in model.model.layers:
        attention = layer.self_attn
        with torch.no_grad():
            for head in range(model.config.num_key_value_heads):
                attention.v_proj.bias[head * attention.head_dim] = size
            attention.o_proj.weight[:, :: attention.head_dim] = 0
    model.save_pretrained(folder / "large")
    return folder / "large"


def test_codes_that_change_logits_much_are_warned_of_and_those_that_change_more_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"kv_dtype": "int8", "has_kernels": lambda *_: False}
    path = with_large_values(1e4, tmp_path)
    with pytest.raises(ModelRefused, match=r"kv_dtype int8 changes logits of random tokens by [\d.]+: use auto"):
        load_model(path, "float32", "cpu", lambda *_: None, **options)
    with_large_values(150, tmp_path)
    assert load_model(path, "float32", "cpu", lambda *_: None, **options).attention.layout.in_codes
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any(text.startswith("K and V are kept in int8, which changes logits of") for text in warnings)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv_dtype 'int4' is unknown: use one of auto, int8, fp8"):
        load("llama", "float32", tmp_path, "int4")
    with pytest.raises(ValueError, match="kv_dtype 'fp8' is not supported on cuda, only on the CPU"):
        load_model(tmp_path, "auto", "cuda", lambda *_: None, kv_dtype="fp8")
