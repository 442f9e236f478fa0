"""The attention backends against each other and against arithmetic written out, on random batches and caches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model_worker.attention import attention_backend, cpu, cuda, reference
from model_worker.batch import ForwardBatch
from model_worker.kv_cache import AttentionParams, KVCache, KVLayout, LayerShape

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    """One layer's attention over a batch of mixed prefill chunks and decode rows."""

    kv_heads: int
    group: int
    k_dim: int
    v_dim: int
    block_size: int
    lens: tuple[tuple[int, int], ...]  # query length and tokens already in the cache, per sequence
    window: int | None
    softcap: float | None
    sinks: bool
    seed: int
    dtype: torch.dtype

    def tensors(self) -> tuple[Tensor, KVCache, ForwardBatch, AttentionParams]:
        torch.manual_seed(self.seed)
        rng = np.random.default_rng(self.seed)
        query_lens = np.array([query for query, _ in self.lens])
        kv_lens = query_lens + [past for _, past in self.lens]
        needed = -(-kv_lens // self.block_size)
        cache = self.random_cache(int(needed.sum()) + 2)
        free = rng.permutation(cache.num_blocks)
        # Entries past a sequence's last block name no block: a kernel that read them would crash.
        tables = np.full((len(self.lens), int(needed.max()) + 1), 1 << 30, np.int32)
        for row, (count, end) in enumerate(zip(needed, np.cumsum(needed), strict=True)):
            tables[row, :count] = free[end - count : end]
        tokens = np.zeros(int(query_lens.sum()), np.int64)
        batch = ForwardBatch.build(tokens, query_lens, kv_lens, tables, self.block_size, tokens[:0])
        sinks = torch.randn(self.kv_heads * self.group) if self.sinks else None
        params = AttentionParams(self.k_dim**-0.5, self.window, self.softcap, sinks)
        # Wide queries make peaked weights, so that one key too many or too few shows.
        q = 3 * torch.randn(self.kv_heads * self.group, len(tokens), self.k_dim)
        return q.transpose(0, 1).to(self.dtype), cache, batch, params

    def random_cache(self, num_blocks: int) -> KVCache:
        layout = KVLayout((LayerShape(self.kv_heads, self.k_dim, self.v_dim),), self.dtype)
        cache = KVCache(layout, num_blocks, self.block_size, torch.device("cpu"))
        cache.k[0].normal_()
        cache.v[0].normal_()
        return cache


cases = st.builds(
    Case,
    kv_heads=st.integers(1, 5),
    group=st.integers(1, 8),
    k_dim=st.integers(1, 80),
    v_dim=st.integers(1, 80),
    block_size=st.sampled_from([8, 16, 32, 64, 128]),
    lens=st.lists(st.tuples(st.integers(1, 70) | st.just(1), st.integers(0, 200)), min_size=1, max_size=6).map(tuple),
    window=st.none() | st.integers(1, 150),
    softcap=st.none() | st.floats(0.5, 50),
    sinks=st.booleans(),
    seed=st.integers(0, 1 << 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest error of any output vector, relative to its size, or to the typical size if it is smaller."""
    error, size = (got.float() - want.float()).norm(dim=-1), want.float().norm(dim=-1)
    return float((error / size.clamp_min(float(size.mean()))).max())


@settings(max_examples=150, deadline=None)
@given(case=cases)
def test_cpu_backend_equals_reference(case: Case) -> None:
    q, cache, batch, params = case.tensors()
    want = reference.attend(q, cache.k[0], cache.v[0], batch, params)
    got = cpu.attend(q, cache.k[0], cache.v[0], batch, params)
    assert got.dtype == q.dtype
    assert relative_error(got, want) < TOLERANCE[case.dtype]


@settings(max_examples=60, deadline=None)
@given(case=cases, spans=st.randoms(use_true_random=False), whole=st.booleans())
def test_cpu_backend_lets_tokens_see_later_keys_as_the_reference_does(case: Case, spans: Any, whole: bool) -> None:
    """Images whose tokens see each other, and prompts whose tokens all do."""
    q, cache, batch, params = case.tensors()
    seen = []
    for queries, past in case.lens:
        own = past + np.arange(queries)
        first, last = own.copy(), own.copy()
        start = spans.randrange(queries)
        end = spans.randrange(start, queries) + 1
        last[start:end] = past + end - 1
        if whole:
            first[start:end] = 0
        seen.append(np.stack([first, last]))
    batch = replace(batch, seen=torch.from_numpy(np.concatenate(seen, axis=1).astype(np.int32)))
    want = reference.attend(q, cache.k[0], cache.v[0], batch, params)
    assert relative_error(cpu.attend(q, cache.k[0], cache.v[0], batch, params), want) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("backend", [cpu, cuda, reference])
def test_layers_that_do_not_look_ahead_see_no_later_keys(backend: Any) -> None:
    case = Case(2, 2, 16, 16, 8, ((6, 3), (5, 0)), None, None, False, 5, torch.float32)
    q, cache, batch, params = case.tensors()
    own = torch.cat([torch.arange(3, 9), torch.arange(5)]).int()
    last = torch.where(torch.arange(11) < 6, 8, 4).int()
    ahead = replace(batch, seen=torch.stack([own, last]))
    want = reference.attend(q, cache.k[0], cache.v[0], ahead, params)
    plain = reference.attend(q, cache.k[0], cache.v[0], batch, params)
    assert relative_error(want, plain) > 0.01
    assert relative_error(backend.attend(q, cache.k[0], cache.v[0], ahead, params), want) < TOLERANCE[torch.float32]
    if backend is not cuda:  # whose kernel there is no device for
        blind = replace(params, looks_ahead=False)
        assert relative_error(backend.attend(q, cache.k[0], cache.v[0], ahead, blind), plain) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_chunks_and_many_decode_rows(dtype: torch.dtype, cores: int) -> None:
    lens = ((300, 500), *[(1, past) for past in range(0, 900, 45)], (513, 0))
    seed = int(np.random.default_rng().integers(1 << 30))
    case = Case(3, 3, 64, 64, 16, lens, None, None, False, seed, dtype)
    q, cache, batch, params = case.tensors()
    threads = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        got = cpu.attend(q, cache.k[0], cache.v[0], batch, params)
    finally:
        torch.set_num_threads(threads)
    assert relative_error(got, reference.attend(q, cache.k[0], cache.v[0], batch, params)) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_arithmetic_written_out(backend: str) -> None:
    """One query head, three keys, a window of two, a sink and a soft cap, by hand."""
    layout = KVLayout((LayerShape(1, 2, 1),), torch.float32)
    cache = KVCache(layout, 4, 2, torch.device("cpu"))
    tables = np.array([[3, 1]], np.int32)
    batch = ForwardBatch.build(np.zeros(3, int), np.array([3]), np.array([3]), tables, 2, np.zeros(0, int))
    keys = torch.tensor([[[9.0, 9.0]], [[1.0, 0.5]], [[-1.0, 2.0]]])
    values = torch.tensor([[[100.0]], [[1.0]], [[-2.0]]])
    cache.write(0, batch, keys, values)
    q = torch.tensor([[[0.0, 0.0]], [[0.0, 0.0]], [[2.0, 1.0]]])
    params = AttentionParams(0.5, sliding_window=2, softcap=1.5, sinks=torch.tensor([0.25]))
    out = attention_backend(backend, torch.device("cpu"))(q, cache.k[0], cache.v[0], batch, params)
    # The last query sees keys 1 and 2: q.k = 2.5 and 0, halved by the scale, capped, beside the sink's 0.25.
    first, second = math.exp(1.5 * math.tanh(1.25 / 1.5)), 1.0
    expected = (first * 1.0 + second * -2.0) / (first + second + math.exp(0.25))
    assert float(out[2]) == pytest.approx(expected, rel=1e-5)


def test_large_logits_neither_overflow_nor_vanish() -> None:
    case = Case(1, 2, 16, 16, 16, ((5, 40), (1, 30)), None, None, True, 0, torch.float32)
    q, cache, batch, params = case.tensors()
    cache.k[0].mul_(300)
    want = reference.attend(q, cache.k[0], cache.v[0], batch, params)
    assert relative_error(cpu.attend(q, cache.k[0], cache.v[0], batch, params), want) < 1e-4


def test_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match=r"'flash' is unknown: use one of auto, reference, cpu, cuda, triton"):
        attention_backend("flash", torch.device("cpu"))


def test_cpu_backend_refuses_blocks_laid_out_token_by_token() -> None:
    case = Case(2, 1, 4, 4, 8, ((1, 3),), None, None, False, 0, torch.float32)
    q, cache, batch, params = case.tensors()
    with pytest.raises(ValueError, match="head by head"):
        cpu.attend(q, cache.k[0].contiguous(), cache.v[0].contiguous(), batch, params)


@pytest.mark.parametrize(
    ("block_size", "group", "dim", "window"), [(8, 1, 5, None), (16, 3, 8, 9), (128, 8, 1, None), (32, 2, 7, 40)]
)
def test_blocks_and_heads_of_unusual_sizes(block_size: int, group: int, dim: int, window: int | None) -> None:
    """A wrong index would spoil the result, or be found where indexes are checked: tests/model_worker/apart.py."""
    shape = ((70, 3), (1, 0), (9, 90), (1, 150))
    case = Case(2, group, dim, 3, block_size, shape, window, 9.0, True, 1, torch.float32)
    q, cache, batch, params = case.tensors()
    want = reference.attend(q, cache.k[0], cache.v[0], batch, params)
    assert relative_error(cpu.attend(q, cache.k[0], cache.v[0], batch, params), want) < 1e-5
