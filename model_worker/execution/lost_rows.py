"""Steps of a model with recurrent states for which a GPU had no memory: their rows begin anew.

Layers write their states one after the other, and none can go back. So a pass that fails leaves its rows with states
that stand for different tokens. The scheduler takes these rows off the worker and puts their sequences back into its
queue, with the tokens they have; until then they are left out of steps. Later passes have at most half as many tokens:
a step of more is cut before it is computed. A row that fails alone begins anew, too; who sends the steps remembers it,
and ends a request to which that happens again. Knows steps and rows; does not know what computes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch

from interfaces import Step, StepResult
from model_worker.execution.base import Executor, RunningRows
from model_worker.execution.flight import Pending
from model_worker.execution.isolation import parts, together
from model_worker.execution.out_of_memory import alone_text, halves
from model_worker.rows import PackedStep

log = logging.getLogger(__name__)


def without(step: Step, lost: Collection[int]) -> Step:
    """Return a step without the rows that are lost."""
    kept = np.isin(step.rows, list(lost), invert=True)
    ntok, ahead = (None if column is None else column[kept] for column in (step.ntok, step.ahead))
    return replace(step, rows=step.rows[kept], ntok=ntok, ahead=ahead)


def launched_with_states(
    executor: Executor, step: Step, packed: PackedStep, running: RunningRows, every_step: Executor
) -> Pending:
    """Launch a step by the executor that has accepted it, or in parts, by one that takes every step."""
    if running.room.holds(len(packed.tokens)):
        pending = _tried(executor, step, packed, running)
    else:
        running.in_flight.finish()
        results = _of_parts(step, running, every_step)
        pending = Pending.finished(together(step, results) if len(results) > 1 else results[0])
    running.room.ended()
    running.counters.step_tokens = running.room.step_tokens
    return pending


def _of_parts(step: Step, running: RunningRows, every_step: Executor) -> list[StepResult]:
    """Compute a step in parts for which there should be memory. Isolated rows are not cut: that changes their bits."""
    results = []
    left = deque(parts(step, running.isolated))
    while left:
        part = without(left.popleft(), running.lost)
        if not len(part.rows):
            continue
        packed = running.rows.pack(part)
        cut = None if running.room.holds(len(packed.tokens)) else _halves(part, packed, running)
        if cut is not None:
            left.extendleft(reversed(cut))
            continue
        results.append(_tried(every_step, part, packed, running).result())
    return results


def _tried(executor: Executor, step: Step, packed: PackedStep, running: RunningRows) -> Pending:
    """Launch a step, or give it up where there is no memory."""
    try:
        pending = executor.launch(step, packed)
    except torch.OutOfMemoryError as error:
        # No more of the error: it holds the frames of the pass, and with them its tensors.
        reason = str(error).partition("\n")[0]
    else:
        running.room.passed(len(packed.tokens))
        return pending
    running.in_flight.finish()
    return Pending.finished(_given_up(step, packed, running, reason))


def _halves(step: Step, packed: PackedStep, running: RunningRows) -> tuple[Step, Step] | None:
    if len(step.rows) == 1 and int(step.rows[0]) in running.isolated:
        return None
    return halves(step, packed)


def _given_up(step: Step, packed: PackedStep, running: RunningRows, reason: str) -> StepResult:
    """Return the result of a step whose pass has failed: its rows begin anew. A row that cannot be cut has an error."""
    # What the allocator keeps for sizes that no smaller pass has would be missing.
    torch.cuda.empty_cache()
    running.lost.update(step.rows.tolist())
    tokens = len(packed.tokens)
    running.room.lower(tokens)
    said = "the GPU has no memory for a pass of %d tokens: its %d rows begin anew, in passes of at most %d; lower "
    said += "max_batch_tokens or kv_memory (%s)"
    log.warning(said, tokens, len(step.rows), running.room.most, reason)
    errors = {int(step.rows[0]): alone_text(reason)} if _halves(step, packed, running) is None else {}
    none = np.empty(0, np.int32)
    identity = running.identity
    return StepResult(
        step.incarnation, identity.epoch, identity.index, step.step, none, none, None, errors, 0, again=step.rows
    )
