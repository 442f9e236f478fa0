"""A step's columns, gathered from the table of rows, against lists of tokens and blocks that are kept row by row.

Rows join with and without a computed prefix, leave in the middle, come again with what they had drawn, compute their
prompts in chunks, go on by guesses and forced tokens, and have up to two steps whose tokens the host has not read.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from interfaces import Join, SamplingParams, Step
from model_worker import batch as batches
from model_worker.batch import ForwardBatch
from model_worker.device_copy import packed_together, upload_together
from model_worker.execution.base import DeviceStep, WorkerIdentity
from model_worker.rows import PackedStep, WorkerRows
from model_worker.sampling.sampler import SamplerRows

ROWS = 6
LONGEST = 40
BLOCK = 4
BLOCKS = 200
STEPS = 60
NONE = np.empty(0, np.int32)


@dataclass
class Sequence:
    """A row's sequence: its tokens, drawn ones among them, how many are computed, and its blocks, which all but some
    have been sent."""

    tokens: list[int]
    computed: int
    prompt: int
    blocks: list[int]
    sent: int = 0


@dataclass
class Drawn:
    """A launched step whose tokens the host has not read."""

    packed: PackedStep
    number: int
    tokens: NDArray[np.int32]


class Life:
    """A worker's rows in random steps, and the lists beside them."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.rows = WorkerRows(ROWS, LONGEST, BLOCK, BLOCKS)
        backend: Any = SimpleNamespace(gives_hidden_states=False, keeps_states=False, device=torch.device("cpu"))
        sampler = SamplerRows(ROWS, 8, torch.device("cpu"))
        self.shared = DeviceStep(self.rows, sampler, backend, WorkerIdentity(0, 0))
        self.last_tokens = torch.full((ROWS,), -1)
        self.sequences: dict[int, Sequence] = {}
        self.left: list[Sequence] = []
        self.flight: deque[Drawn] = deque()

    def step(self) -> None:
        drop = [row for row in self.sequences if self.rng.random() < 0.08]
        self.left += [self.sequences.pop(row) for row in drop]
        joins = [self._joining(row) for row in range(ROWS) if row not in self.sequences and self.rng.random() < 0.3]
        chunks = {row: self._chunk(sequence) for row, sequence in self._order() if self.rng.random() < 0.85}
        step = Step(
            incarnation=1,
            epoch=0,
            step=0,
            rows=np.array(list(chunks), np.int32),
            ntok=None if set(chunks.values()) == {1} else np.array(list(chunks.values()), np.int32),
            new_blocks=np.array(self._new_blocks(chunks), np.int32).reshape(-1, 3),
            drop=np.array(drop, np.int32),
            joins=joins,
        )
        self.rows.apply(step)
        if not chunks:
            return
        packed = self.rows.pack(step)
        owners = self.rows.owners(packed)
        batch = self.shared.batch(packed, owners=owners, last_tokens=self.last_tokens)
        self._compare(batch, chunks)
        self._go_on(packed, chunks)

    def _order(self) -> list[tuple[int, Sequence]]:
        rows = list(self.sequences.items())
        return [rows[i] for i in self.rng.permutation(len(rows))]

    def _joining(self, row: int) -> Join:
        """A new sequence, or one that has left, with or without a prefix that is computed already."""
        if self.left and self.rng.random() < 0.5:
            old = self.left.pop()
            tokens, prompt = old.tokens, old.prompt
        else:
            tokens = self.rng.integers(0, 1000, self.rng.integers(1, LONGEST // 2)).tolist()
            prompt = len(tokens)
        start = int(self.rng.integers(0, len(tokens))) if self.rng.random() < 0.5 else 0
        has = self.rng.integers(0, BLOCKS, -(-start // BLOCK)).tolist()
        self.sequences[row] = Sequence(tokens, start, prompt, has)
        sampling = SamplingParams()
        return Join(row=row, tokens=np.array(tokens, np.int32), prompt_len=prompt, start=start, sampling=sampling)

    def _chunk(self, sequence: Sequence) -> int:
        left = len(sequence.tokens) - sequence.computed
        return left if self.rng.random() < 0.5 else int(self.rng.integers(1, left + 1))

    def _new_blocks(self, chunks: dict[int, int]) -> list[tuple[int, int, int]]:
        """Give rows the blocks for their chunks, and some of them more."""
        new = []
        for row, sequence in self.sequences.items():
            most = sequence.computed + chunks.get(row, 0) + int(self.rng.integers(0, 4))
            missing = max(0, -(-most // BLOCK) - len(sequence.blocks))
            sequence.blocks += self.rng.integers(0, BLOCKS, missing).tolist()
            new += [(row, i, sequence.blocks[i]) for i in range(sequence.sent, len(sequence.blocks))]
            sequence.sent = len(sequence.blocks)
        return new

    def _compare(self, batch: ForwardBatch, chunks: dict[int, int]) -> None:
        want: dict[str, list[int]] = {name: [] for name in ("tokens", "positions", "slots", "kv_len", "starts")}
        want |= {"query_start": [0], "logit_positions": [], "rows": list(chunks), "query_lens": list(chunks.values())}
        for i, (row, count) in enumerate(chunks.items()):
            sequence = self.sequences[row]
            places = range(sequence.computed, sequence.computed + count)
            want["tokens"] += [sequence.tokens[place] for place in places]
            want["positions"] += places
            want["slots"] += [sequence.blocks[place // BLOCK] * BLOCK + place % BLOCK for place in places]
            want["query_start"].append(want["query_start"][-1] + count)
            want["starts"].append(places.start)
            want["kv_len"].append(places.stop)
            if places.stop == len(sequence.tokens):
                want["logit_positions"].append(want["query_start"][-1] - 1)
            used = -(-places.stop // BLOCK)
            assert batch.block_tables[i, :used].tolist() == sequence.blocks[:used]
        found = vars(batch) | {"tokens": batch.resolved().tokens}
        assert {name: found[name].tolist() for name in want} == want
        assert batch.wanted is not None
        assert batch.wanted.tolist() == want["logit_positions"]
        assert (batch.max_query, batch.max_kv) == (max(chunks.values()), max(want["kv_len"]))
        assert batch.decodes == (want["logit_positions"] == list(range(len(chunks))) and batch.max_query == 1)
        wide, narrow = ("tokens", "positions", "slots", "logit_positions"), ("query_start", "kv_len", "block_tables")
        for dtype, names in ((torch.int64, wide), (torch.int32, narrow)):
            assert all(found[name].dtype == dtype and found[name].is_contiguous() for name in names)

    def _go_on(self, packed: PackedStep, chunks: dict[int, int]) -> None:
        drawn = self.rng.integers(0, 1000, len(packed.sampling)).astype(np.int32)
        for row, count in chunks.items():
            self.sequences[row].computed += count
        for row, token in zip(packed.sampling_rows.tolist(), drawn.tolist(), strict=True):
            self.sequences[row].tokens.append(token)
            self.last_tokens[row] = token
        self.flight.append(Drawn(packed, self.rows.launch(packed), drawn))
        while len(self.flight) > (1 if self.rng.random() < 0.8 else 0):
            launched = self.flight.popleft()
            self.rows.read(launched.packed, launched.tokens, launched.number)
        if not self.flight:
            self._follow(packed.sampling_rows.tolist())
        for row, sequence in list(self.sequences.items()):
            if len(sequence.tokens) > LONGEST - 4:
                # It ends: the next step drops it, and another takes its row.
                del self.sequences[row]

    def _follow(self, rows: list[int]) -> None:
        """Let some of the rows go on by right guesses, which are computed, or by tokens that a grammar forces."""
        for row in rows:
            more = self.rng.integers(0, 1000, self.rng.integers(1, 3)).astype(np.int32)
            sequence, way = self.sequences[row], self.rng.random()
            if len(sequence.tokens) + len(more) > LONGEST - 4 or way > 0.4:
                continue
            if way < 0.2 and sequence.sent * BLOCK >= sequence.computed + len(more):
                self.rows.accept(row, more)
                sequence.computed += len(more)
            else:
                self.rows.follow(row, more)
            sequence.tokens += more.tolist()


@pytest.mark.parametrize("together", [upload_together, packed_together])
def test_columns_are_those_of_the_rows_one_by_one(together: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, and in one piece of memory as for a GPU."""
    monkeypatch.setattr(batches, "upload_together", together)
    for seed in range(20):
        life = Life(seed)
        for _ in range(STEPS):
            life.step()
