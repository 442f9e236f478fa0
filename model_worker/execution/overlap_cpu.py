"""Greedy steps on a CPU, begun before the tokens of the step before are read, and repeated without a further message.

The backend's threads compute while the worker's own one sends the last result and prepares the next step. Tokens stay
in an array that the next passes read. This file alone knows that one launch may be several steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from interfaces import Step, StepResult
from model_worker.cpu.fused.stack import Drawn, Passes
from model_worker.execution.base import DeviceStep
from model_worker.execution.flight import Pending
from model_worker.execution.speculation import Speculation
from model_worker.rows import PackedStep
from model_worker.sampling.sampler import Sampled


class OverlapCpu:
    """Takes steps whose rows need nothing but their largest logit, once the backend has `launch_greedy`."""

    def __init__(self, shared: DeviceStep, speculation: Speculation | None = None) -> None:
        """With `speculation` a row's passes end as soon as there is something to guess."""
        self._shared = shared
        self._speculation = speculation
        # Of rows whose last token the host has not read.
        self._last_tokens = np.zeros(shared.rows.max_rows, np.int64)

    def accepts(self, step: Step, packed: PackedStep) -> bool:
        shared = self._shared
        return shared.backend.launch_greedy is not None and packed.plain and not shared.needs_logits(packed).any()

    def launch(self, step: Step, packed: PackedStep) -> Pending:
        since = time.perf_counter_ns()
        shared = self._shared
        launch_greedy = shared.backend.launch_greedy
        assert launch_greedy is not None
        rows = packed.rows[packed.sampling]
        unread = np.full(len(packed.tokens), -1)
        places, owners = shared.rows.unread(packed)
        unread[places] = owners
        drawn = Drawn(unread, rows.astype(np.int64), self._last_tokens)
        passes = launch_greedy(shared.batch(packed), drawn, 1 + step.repeats)
        launched = _Launched(
            shared=shared,
            speculation=self._speculation if len(rows) == 1 else None,
            step=step,
            packed=packed,
            rows=rows,
            errors=shared.refusals(rows),
            passes=passes,
            number=shared.rows.begun_steps(packed, passes.count),
            since=since,
            planned=passes.count,
        )
        pending = Pending(launched.read, passes.count, launched.stop)
        shared.in_flight.add(pending)
        return pending


@dataclass(slots=True)
class _Launched:
    """Passes in a row: a step, and the first of its repetitions."""

    shared: DeviceStep
    speculation: Speculation | None
    step: Step
    packed: PackedStep
    rows: NDArray[np.int32]
    errors: dict[int, str]
    passes: Passes
    number: int
    since: int
    planned: int
    # Whether another step came before all passes had begun.
    replaced: bool = False

    def read(self, which: int) -> StepResult:
        """Waits for one of the passes, and books its tokens."""
        shared = self.shared
        sampled = Sampled.of(self.passes.wait(which))
        shared.rows.read_step(self.packed, sampled.tokens, self.number, which)
        if self.speculation is not None and self.speculation.may_guess(self.packed, which + 1):
            shared.in_flight.hold()
        last = which == self.passes.count - 1
        if last:
            shared.rows.read_last(self.packed, self.number)
        now = time.perf_counter_ns()
        device_us = (now - self.since) // 1000
        self.since = now
        number = self.step.step + which
        result = shared.result(number, self.step.incarnation, self.rows, sampled, self.errors, device_us)
        return replace(result, last=True) if last and self.replaced else result

    def stop(self, for_good: bool) -> int:
        """Lets the pass in progress be the last, and takes the others back."""
        self.passes.stop()
        count = self.passes.count
        self.replaced = self.replaced or (for_good and count < self.planned)
        self.shared.rows.left_out(self.packed.rows, self.number, self.planned - count)
        self.planned = count
        return count
