"""The paged KV cache: sizes in bytes, where tokens land, and sober defaults."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_worker import kv_cache
from model_worker.batch import ForwardBatch
from model_worker.kv_cache import CPU_LIMIT, KVCache, KVLayout, LayerShape, default_kv_memory

CPU = torch.device("cpu")
layouts = st.builds(
    KVLayout,
    st.lists(
        st.builds(LayerShape, st.integers(1, 4), st.integers(1, 24), st.integers(1, 24)), min_size=1, max_size=4
    ).map(tuple),
    st.sampled_from([torch.float32, torch.bfloat16]),
)


@given(layout=layouts, num_blocks=st.integers(1, 9), block_size=st.integers(1, 33))
def test_bytes_are_those_of_the_tensors(layout: KVLayout, num_blocks: int, block_size: int) -> None:
    cache = KVCache(layout, num_blocks, block_size, CPU)
    assert sum(tensor.nbytes for tensor in [*cache.k, *cache.v]) == cache.num_bytes
    for layer, k, v in zip(layout.layers, cache.k, cache.v, strict=True):
        assert k.shape == (num_blocks, block_size, layer.kv_heads, layer.k_dim)
        assert v.shape == (num_blocks, block_size, layer.kv_heads, layer.v_dim)


@given(layout=layouts, block_size=st.integers(1, 33), memory=st.integers(1, 1 << 24))
def test_as_many_blocks_as_fit(layout: KVLayout, block_size: int, memory: int) -> None:
    size = layout.bytes_per_block(block_size)
    if memory < size:
        with pytest.raises(ValueError, match="does not hold one block"):
            layout.blocks_for(memory, block_size)
    else:
        blocks = layout.blocks_for(memory, block_size)
        assert blocks * size <= memory < (blocks + 1) * size


def test_tokens_land_in_their_slots_and_nowhere_else() -> None:
    rng = np.random.default_rng()
    layout = KVLayout((LayerShape(2, 3, 5),) * 2, torch.float32)
    cache = KVCache(layout, 12, 4, CPU)
    tables = rng.permutation(12).astype(np.int32).reshape(3, 4)
    lens, kv_lens = np.array([3, 1, 6]), np.array([9, 16, 6])
    batch = ForwardBatch.build(rng.integers(0, 9, 10), lens, kv_lens, tables, 4, np.zeros(0, np.int64))
    k, v = torch.randn(10, 2, 3), torch.randn(10, 2, 5)
    cache.write(1, batch, k, v)
    token = 0
    for row, (count, end) in enumerate(zip(lens, kv_lens, strict=True)):
        for position in range(end - count, end):
            where = tables[row, position // 4], position % 4
            assert torch.equal(cache.k[1][where], k[token])
            assert torch.equal(cache.v[1][where], v[token])
            token += 1
    assert int((cache.k[1].abs().sum((2, 3)) > 0).sum()) == 10
    assert not cache.k[0].any()


def test_default_budget_is_a_quarter_of_free_memory_but_not_more_than_4_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, budget in ((2 << 30, 1 << 29), (400 << 30, CPU_LIMIT)):
        monkeypatch.setattr(kv_cache, "free_memory", lambda free=free: free)
        assert default_kv_memory(CPU) == budget


@given(free=st.integers(4, 1 << 34))
def test_a_default_budget_is_one_of_sixteen_sizes_between_powers_of_two(free: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "free_memory", lambda: free)
        size = default_kv_memory(CPU)
    assert free // 4 * 15 // 16 <= size <= free // 4
    assert len(f"{size:b}".rstrip("0")) <= 5


def test_the_same_limit_gives_the_same_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory differs by some megabytes from start to start."""
    sizes = set()
    for free in range(900 << 20, 925 << 20, 1 << 20):
        monkeypatch.setattr(kv_cache, "free_memory", lambda free=free: free)
        sizes.add(default_kv_memory(CPU))
    assert sizes == {224 << 20}


def test_models_on_one_gpu_leave_room_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    device = torch.device("cuda")
    assert [default_kv_memory(device, models) for models in (1, 2)] == [850, 425]


def test_a_batch_with_inconsistent_columns_is_refused() -> None:
    one, table = np.ones(1, np.int64), np.zeros((1, 2), np.int32)
    for tokens, lens, kv_lens, tables, message in (
        (one[:0], one, one, table, "empty batch"),
        (one, one, np.ones(2, np.int64), table, "number of sequences"),
        (one, one * 2, one * 2, table, "add up to 2"),
        (one, one, one * 0, table, "must count its query tokens"),
        (one, one, one * 9, table, "block_tables hold 2 blocks of 4"),
    ):
        with pytest.raises(ValueError, match=message):
            ForwardBatch.build(tokens, lens, kv_lens, tables, 4, one[:0])
