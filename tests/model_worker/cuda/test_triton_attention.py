"""Triton's paged attention, interpreted on the CPU, against attention in plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from model_worker.attention import reference
from model_worker.attention import triton as backend
from model_worker.batch import ForwardBatch
from model_worker.kv_cache import AttentionParams, KVCache, KVLayout, LayerShape
from model_worker.loading import verify
from model_worker.loading.gpu_attention import Candidate, candidates, check_attention, choose_attention
from model_worker.loading.load import load_model
from tests.model_worker.cuda.interpreter import need_triton
from tests.model_worker.test_attention import Case, relative_error
from tests.model_worker.tiny_models import tiny_model

need_triton()

PIECE = 64
# Query tokens of each sequence, and those before them: around the edges of blocks, tiles and pieces.
DECODE = ((1, 0), (1, 14), (1, 15), (1, 16), (1, 63), (1, 64), (1, 150))
PROMPTS = ((5, 0), (70, 0), (3, 90))
MIXED = ((1, 130), (18, 40), (1, 0), (2, 63))
# Without bfloat16: Triton's interpreter multiplies its bits as integers.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}
# Heads: K/V heads, query heads of each, and the sizes of K and V.
USUAL = (2, 3, 64, 64)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short sequences have several."""
    monkeypatch.setattr(backend, "PIECE", PIECE)


def random_case(
    heads: tuple[int, int, int, int] = USUAL,
    lens: tuple[tuple[int, int], ...] = MIXED,
    page: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Case:
    return Case(*heads, page, lens, window, softcap, sinks, 0, dtype)


def tensors(case: Case) -> tuple[Tensor, KVCache, ForwardBatch, AttentionParams]:
    """Draw a case's values."""
    return replace(case, seed=int(np.random.default_rng().integers(1 << 30))).tensors()


@pytest.mark.parametrize(
    "case",
    [
        random_case(lens=DECODE),
        random_case(lens=DECODE, window=20, sinks=True),
        random_case(lens=PROMPTS, softcap=5.0),
        random_case(lens=PROMPTS, window=33, page=32),
        random_case(softcap=2.0, sinks=True, window=7),
        random_case(page=256, dtype=torch.float16),
        random_case((1, 7, 80, 80), dtype=torch.float16),
        random_case((3, 1, 24, 24)),
        random_case((1, 20, 96, 64), sinks=True),
        random_case((2, 2, 192, 128), dtype=torch.float16),
        random_case((1, 16, 576, 512), ((1, 70), (3, 10))),
        random_case((1, 4, 256, 256), ((1, 70), (3, 10)), window=50),
    ],
    ids=lambda case: f"{case.k_dim}-{case.v_dim}-{case.group}-{case.block_size}-{len(case.lens)}-{case.window}",
)
def test_the_kernels_equal_the_reference(case: Case) -> None:
    q, cache, batch, params = tensors(case)
    want = reference.attend(q, cache.k[0], cache.v[0], batch, params)
    got = backend.attend(q, cache.k[0], cache.v[0], batch, params)
    assert got.dtype == q.dtype
    assert relative_error(got, want) < TOLERANCE[case.dtype]


def test_blocks_may_lie_as_on_a_gpu() -> None:
    q, cache, batch, params = tensors(random_case())
    k, v = cache.k[0].contiguous(), cache.v[0].contiguous()
    assert not cache.k[0].is_contiguous()
    got = backend.attend(q.contiguous(), k, v, batch, params)
    assert torch.equal(got, backend.attend(q, cache.k[0], cache.v[0], batch, params))


def test_a_decode_row_depends_on_nothing_else_in_its_batch() -> None:
    """Neither on other rows, nor on the longest of them, nor on prompts beside it."""
    q, cache, batch, params = tensors(random_case(lens=((1, 40), (1, 150), (9, 100))))
    together = backend.attend(q, cache.k[0], cache.v[0], batch, params)
    for row in range(2):
        assert torch.equal(alone(q, cache, batch, params, row), together[row])


def alone(q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams, row: int) -> Tensor:
    one = np.array([1])
    length = batch.kv_len[row : row + 1].numpy()
    tables = batch.block_tables[row : row + 1].numpy()
    single = ForwardBatch.build(one, one, length, tables, batch.block_size, one[:0])
    return backend.attend(q[row : row + 1], cache.k[0], cache.v[0], single, params)[0]


def test_a_bound_of_lengths_that_no_row_reaches_changes_nothing() -> None:
    """Recorded steps have such a bound."""
    q, cache, batch, params = tensors(random_case(lens=DECODE, window=70))
    got = backend.attend(q, cache.k[0], cache.v[0], replace(batch, max_kv=5 * PIECE), params)
    assert torch.equal(got, backend.attend(q, cache.k[0], cache.v[0], batch, params))


@pytest.mark.parametrize("heads", [(2, 1, 64, 64), (1, 1, 24, 40)])
def test_k_and_v_are_written_as_the_cache_writes_them(heads: tuple[int, int, int, int]) -> None:
    _, cache, batch, _ = tensors(random_case(heads))
    kv_heads, _, k_dim, v_dim = heads
    # As transformers' modules give them: heads before tokens in memory.
    k = torch.randn(kv_heads, batch.num_tokens, k_dim).transpose(0, 1)
    v = torch.randn(batch.num_tokens, kv_heads, v_dim)
    before = cache.k[0].clone(), cache.v[0].clone()
    cache.write(0, batch, k, v)
    want = cache.k[0].clone(), cache.v[0].clone()
    cache.k[0].copy_(before[0])
    cache.v[0].copy_(before[1])
    backend.write(cache.k[0], cache.v[0], batch, k, v)
    assert torch.equal(cache.k[0], want[0])
    assert torch.equal(cache.v[0], want[1])
    assert not torch.equal(want[0], before[0])


def test_what_the_kernels_cannot_do_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KVLayout((LayerShape(1, 576, 512),), torch.bfloat16)
    gpu = torch.device("cuda")
    assert backend.unsupported(layout, gpu) is None
    assert "not on cpu" in str(backend.unsupported(layout, torch.device("cpu")))
    assert "float64" in str(backend.unsupported(replace(layout, dtype=torch.float64), gpu))
    assert "2048 elements" in str(backend.unsupported(KVLayout((LayerShape(1, 64, 2048),), torch.float16), gpu))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "triton is not installed" in str(backend.unsupported(layout, gpu))


@pytest.mark.slow
def test_a_model_is_served_by_the_kernels_if_they_prove_themselves(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path: Path = tiny_model("gemma2", tmp_path_factory.getbasetemp())
    loaded = load_model(path, "float32", "cpu", lambda *_: None)
    tokens = verify.tokens(loaded.model.config, loaded.device)
    with torch.inference_mode():
        expected = verify.eager_logits(loaded.model, tokens)
    assert all(candidate.reason for candidate in candidates(loaded)), "a CPU has none of them"
    kernel = Candidate("triton", 16, None)
    served = choose_attention(loaded, tokens, expected, [Candidate("cuda", 256, "no GPU"), kernel])
    assert (served.attention_name, served.block_size) == ("triton", 16)

    def wrong(q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, params: AttentionParams) -> Tensor:
        return backend.attend(q, k, v, batch, replace(params, sliding_window=None))

    monkeypatch.setattr("model_worker.attention._BACKENDS", {"triton": wrong})
    with pytest.raises(ValueError, match="attends to decode rows otherwise than plain torch"):
        check_attention(loaded, kernel)
    assert choose_attention(loaded, tokens, expected, [kernel]).attention_name == "reference"
    assert "attends in plain torch" in caplog.text
