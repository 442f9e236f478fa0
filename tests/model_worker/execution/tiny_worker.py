"""A worker's engine around a tiny model, the steps that a scheduler would send it, and which executor took which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from interfaces import Join, SamplingParams, Step
from model_worker.drafters.chosen import without_models
from model_worker.engine import Engine
from model_worker.execution import executors_for
from model_worker.execution.base import DeviceStep, Executor, WorkerIdentity
from model_worker.execution.flight import Pending
from model_worker.model import LoadedModel
from model_worker.rows import PackedStep, WorkerRows
from model_worker.runner import ModelRunner
from model_worker.sampling.sampler import SamplerRows

ROWS = 6
BLOCK_SIZE = 16
BLOCKS_PER_ROW = 8
NONE = np.empty(0, np.int32)


class Recorded:
    """An executor whose name is written down for each step that it launches."""

    def __init__(self, executor: Executor, taken: list[str]) -> None:
        self._executor = executor
        self._taken = taken

    def accepts(self, step: Step, packed: PackedStep) -> bool:
        return self._executor.accepts(step, packed)

    def launch(self, step: Step, packed: PackedStep) -> Pending:
        self._taken.append(type(self._executor).__name__)
        return self._executor.launch(step, packed)


class TinyWorker:
    """`overlap` and `most_guesses` are those of `executors_for`. A row has all its blocks from its join on."""

    def __init__(
        self, loaded: LoadedModel, overlap: str = "off", most_guesses: int = 0, block_size: int = BLOCK_SIZE
    ) -> None:
        runner = ModelRunner(loaded, ROWS * BLOCKS_PER_ROW, block_size)
        rows = WorkerRows(ROWS, BLOCKS_PER_ROW * block_size, block_size, runner.num_blocks)
        self.backend: Any = runner.backend
        sampler = SamplerRows(ROWS, loaded.vocab_size, loaded.device, counts_there=overlap == "cuda")
        self.shared = DeviceStep(rows, sampler, self.backend, WorkerIdentity(0, 0))
        drafters = without_models("text,suffix")
        self.executors = executors_for(self.shared, overlap, most_guesses, drafters=drafters)
        self.taken: list[str] = []
        self.engine = Engine(self.shared, [Recorded(executor, self.taken) for executor in self.executors])
        self._steps = 0

    def begin(
        self,
        rows: Sequence[int],
        ntok: Sequence[int] | None = None,
        joins: Sequence[Join] = (),
        drop: Sequence[int] = (),
        ahead: int = 0,
    ) -> Pending:
        step = self.step(rows, ntok, joins, drop, ahead)
        return self.engine.begin(step)

    def step(
        self,
        rows: Sequence[int],
        ntok: Sequence[int] | None = None,
        joins: Sequence[Join] = (),
        drop: Sequence[int] = (),
        ahead: int = 0,
    ) -> Step:
        """A step; each of its rows has room for `ahead` guesses."""
        blocks = [
            (join.row, index, join.row * BLOCKS_PER_ROW + index) for join in joins for index in range(BLOCKS_PER_ROW)
        ]
        step = Step(
            incarnation=1,
            epoch=0,
            step=self._steps,
            rows=np.array(rows, np.int32),
            ntok=None if ntok is None else np.array(ntok, np.int32),
            new_blocks=np.array(blocks, np.int32).reshape(-1, 3),
            drop=np.array(drop, np.int32),
            joins=list(joins),
            ahead=np.full(len(rows), ahead, np.int32) if ahead else None,
        )
        self._steps += 1
        return step

    def prefill(self, *joins: Join) -> None:
        """Computes the prompts of new rows, and forgets who did so."""
        self.begin([join.row for join in joins], [len(join.tokens) for join in joins], joins).result()
        self.taken.clear()


def join(row: int, tokens: Sequence[int], params: SamplingParams | None = None, **fields: Any) -> Join:
    """A new sequence, which is greedy without `params`."""
    return Join(
        row=row,
        tokens=np.array(tokens, np.int32),
        prompt_len=len(tokens),
        start=0,
        sampling=params or SamplingParams(temperature=0.0),
        **fields,
    )
