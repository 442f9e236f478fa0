"""Rows in decode that begin with the same blocks read them together, and nothing changes for any of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from model_worker.batch import ForwardBatch
from model_worker.cpu.fused.attention_plan import PANEL_KEYS, TILE_ROWS, plan_for
from model_worker.runner import ModelRunner
from tests.model_worker.cpu.test_fused_stack import load, logits, relative
from tests.model_worker.tiny_models import VOCAB

BLOCK = 16


class Tree:
    """Sequences over one cache, some of which begin with blocks of earlier ones."""

    def __init__(self, rng: np.random.Generator, sequences: int, longest: int) -> None:
        self._rng, self._used = rng, 0
        self.tables: list[NDArray[np.int64]] = []
        self.lengths: list[int] = []
        self._starts: list[int] = []
        for _ in range(sequences):
            shared, known = np.empty(0, np.int64), 0
            if self.tables and rng.random() < 0.7:
                parent = int(rng.integers(len(self.tables)))
                known = min(20, self.lengths[parent] // BLOCK)
                known = int(rng.integers(known + 1)) if rng.random() < 0.3 else known
                shared = self.tables[parent][:known]
            length = known * BLOCK + int(rng.integers(1, longest + 1))
            blocks = -(-(length + 16) // BLOCK)
            self.tables.append(np.concatenate([shared, self._fresh(blocks - known)]))
            self.lengths.append(length)
            self._starts.append(known * BLOCK)

    def _fresh(self, count: int) -> NDArray[np.int64]:
        self._used += count
        return np.arange(self._used - count, self._used)

    @property
    def num_blocks(self) -> int:
        return self._used

    def batch(self, members: list[int], chunks: list[int]) -> ForwardBatch:
        """The next so many tokens of each member; afterwards they are known."""
        width = max(len(self.tables[s]) for s in members)
        tables = np.array([np.pad(self.tables[s], (0, width - len(self.tables[s]))) for s in members])
        tokens = self._rng.integers(3, VOCAB, sum(chunks))
        lengths = np.array([self.lengths[s] for s in members])
        return ForwardBatch.build(tokens, np.array(chunks), lengths, tables, BLOCK, np.cumsum(chunks) - 1)

    def prompts(self) -> list[ForwardBatch]:
        """Each one's own tokens, one sequence after the other, as the later ones find the earlier in the cache."""
        return [self.batch([s], [self.lengths[s] - self._starts[s]]) for s in range(len(self.tables))]

    def decode(self) -> ForwardBatch:
        """One more token for most, and a chunk for some."""
        order = self._rng.permutation(len(self.tables)).tolist()
        members = order[: int(self._rng.integers(len(order) // 2, len(order))) + 1]
        chunks = [1 if self._rng.random() < 0.8 else 3 for _ in members]
        for s, chunk in zip(members, chunks, strict=True):
            self.lengths[s] += chunk
        return self.batch(members, chunks)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 20), st.integers(1, 300), st.integers(1, 8), st.integers(1, 4))
def test_a_plan_holds_every_query_once(seed: int, sequences: int, longest: int, group: int, cores: int) -> None:
    batch = Tree(np.random.default_rng(seed), sequences, longest).decode()
    tiles, members, units = plan_for(batch, 3, group, cores)
    tokens: list[int] = []
    tables, starts = batch.block_tables.numpy(), batch.query_start.numpy()
    for sequence, first, count, position, together, shared in tiles.tolist():
        if not together:
            own = list(range(first, first + count))
            assert starts[sequence] <= first < starts[sequence + 1]
            assert position == batch.positions[first]
        else:
            assert 2 <= together == count <= max(2, TILE_ROWS // group)
            rows = members[sequence : sequence + together]
            own = rows[:, 1].tolist()
            assert shared > 0
            assert shared % PANEL_KEYS == 0
            assert (shared <= rows[:, 2]).all()
            assert (batch.positions.numpy()[own] == rows[:, 2]).all()
            assert len({tuple(tables[s, : shared // BLOCK]) for s in rows[:, 0]}) == 1
        tokens += own
    assert sorted(tokens) == list(range(batch.num_tokens))
    heads = np.zeros((len(tiles), 3), np.int64)
    for tile, first, end in units.tolist():
        heads[tile, first:end] += 1
    assert (heads == 1).all()


@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_begin_alike_give_what_each_gives_alone(arch: str, dtype: str, tmp_path_factory: Any) -> None:
    rng = np.random.default_rng()
    overrides: dict[str, Any] = {"sliding_window": int(rng.choice([8, 100, 1000]))} if arch == "mistral" else {}
    loaded = load(arch, dtype, tmp_path_factory.getbasetemp(), **overrides)
    assert loaded.stack is not None
    steps: list[ForwardBatch] = []
    while not any(plan_for(step, 1, 2, 2).tiles[:, 4].any() for step in steps):
        tree = Tree(rng, 12, 150)
        prompts, steps = tree.prompts(), [tree.decode() for _ in range(3)]
    together, alone, reference = (
        ModelRunner(loaded, tree.num_blocks, BLOCK, name) for name in ("cpu", "cpu", "reference")
    )
    for runner in (together, alone, reference):
        logits(runner, prompts)
    for step in steps:
        got = logits(together, [step])
        assert torch.equal(got, torch.cat([logits(alone, [_only(step, s)]) for s in range(step.num_sequences)]))
        if dtype == "float32":  # rounding to bfloat16 differs between backends
            assert relative(got, logits(reference, [step])) < 1e-5


def _only(batch: ForwardBatch, s: int) -> ForwardBatch:
    first, end = batch.query_start[s : s + 2].tolist()
    return ForwardBatch.build(
        batch.tokens[first:end].numpy(),
        np.array([end - first]),
        batch.kv_len[s : s + 1].numpy(),
        batch.block_tables[s : s + 1].numpy(),
        BLOCK,
        np.array([end - first - 1]),
    )
