"""Steps for which a GPU had no memory, computed again in parts: halves of the rows, then halves of a row's prompt.

What a pass needs beside weights and K/V grows with its tokens, so a part needs less. A row that fails by itself gets an
error of its own; the others go on, and no request is taken for one that ends workers. K and V of a part that was
computed twice are the same. A step that cannot be repeated exactly fails as a whole, and ends the worker: one with
isolated rows, whose bits would change with the parts, and one that failed after it had drawn tokens for rows that
remember them. Rows with recurrent states begin anew instead: `lost_rows.py`. Knows steps and rows; does not know what
computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import Step, StepResult
from model_worker.execution.base import Executor, RunningRows
from model_worker.execution.flight import Pending
from model_worker.execution.isolation import together
from model_worker.rows import PackedStep

log = logging.getLogger(__name__)

Launch = Callable[[Step, PackedStep], Pending]


def launched(executor: Executor, step: Step, packed: PackedStep, running: RunningRows, every_step: Executor) -> Pending:
    """Launch a step by the executor that has accepted it, or in parts, by one that takes every step."""
    running.repeatable = True
    try:
        return executor.launch(step, packed)
    except torch.OutOfMemoryError as caught:
        if running.isolated or not running.repeatable:
            raise
        error = RuntimeError(str(caught))
    # Out of the handler: the error that was caught holds the frames of the pass, and with them its tensors.
    return run_in_parts(step, running, every_step.launch, error)


def run_in_parts(step: Step, running: RunningRows, launch: Launch, error: Exception) -> Pending:
    """Compute a step whose launch has failed with `error`, and changed no row; `launch` must take every step."""
    log.warning(
        "the GPU has no memory for a step of %d rows: it runs in parts; lower max_batch_tokens or kv_memory (%s)",
        len(step.rows),
        str(error).partition("\n")[0],
    )
    running.in_flight.finish()
    none = np.empty(0, np.int32)
    whole = replace(step, new_blocks=none.reshape(0, 3), drop=none, joins=[], ahead=None)
    results = _results(whole, running, launch)
    return Pending.finished(together(step, results) if len(results) > 1 else results[0])


def _results(step: Step, running: RunningRows, launch: Launch) -> list[StepResult]:
    """Return the results of a step's parts, of which there is one if the device has memory for all."""
    # What the allocator keeps for sizes that no part has would be missing.
    torch.cuda.empty_cache()
    packed = running.rows.pack(step)
    running.repeatable = True
    try:
        return [launch(step, packed).result()]
    except torch.OutOfMemoryError as error:
        if not running.repeatable:
            raise
        reason = str(error).partition("\n")[0]
    # Out of the handler: the error holds the frames of the pass, and with them its tensors.
    if (parts := halves(step, packed)) is None:
        return [_failed(step, running, reason)]
    first, second = parts
    results = _results(first, running, launch)
    if len(step.rows) == 1 and results[-1].errors:
        _skip(second, running)
        return results
    return results + _results(second, running, launch)


def halves(step: Step, packed: PackedStep) -> tuple[Step, Step] | None:
    """Cut a step in two; None if it cannot be cut."""
    half = len(step.rows) // 2
    if half:
        index = np.arange(len(step.rows))
        return _of_rows(step, index[:half]), _of_rows(step, index[half:])
    tokens = int(packed.ntok[0])
    # Tokens of an image that see later ones must be computed together with them.
    if tokens == 1 or packed.seen is not None:
        return None
    first = np.array([tokens // 2], np.int32)
    return replace(step, ntok=first), replace(step, ntok=packed.ntok - first)


def _of_rows(step: Step, index: NDArray[np.int64]) -> Step:
    return replace(step, rows=step.rows[index], ntok=None if step.ntok is None else step.ntok[index])


def alone_text(reason: str) -> str:
    """Say that there is no memory for a row, although it is computed alone."""
    return f"the GPU has no memory for this request alone; lower kv_memory or max_batch_tokens: {reason}"


def _skip(step: Step, running: RunningRows) -> None:
    """Count the tokens of a row that fails as computed, since steps in flight go on from there."""
    packed = running.rows.pack(step)
    running.rows.commit(packed, np.zeros(len(packed.sampling), np.int32))


def _failed(step: Step, running: RunningRows, reason: str) -> StepResult:
    """Return the result of a step of one row, for which alone there is no memory."""
    _skip(step, running)
    row = int(step.rows[0])
    text = alone_text(reason)
    log.error("row %d fails: %s", row, text)
    none = np.empty(0, np.int32)
    identity = running.identity
    return StepResult(step.incarnation, identity.epoch, identity.index, step.step, none, none, None, {row: text}, 0)
