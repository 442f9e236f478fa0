"""Greedy steps on a CPU, launched before the tokens of the step before are read.

The backend's threads compute while the worker's own one sends the last result and prepares the next step. Tokens stay
in an array that the next pass reads.
"""

from __future__ import annotations

import time

import numpy as np

from interfaces import Step, StepResult
from model_worker.batch import DeferredTokens
from model_worker.execution.base import DeviceStep
from model_worker.execution.flight import Pending
from model_worker.rows import PackedStep
from model_worker.sampling.sampler import Sampled


class OverlapCpu:
    """Takes steps whose rows need nothing but their largest logit. The backend must have `launch`."""

    def __init__(self, shared: DeviceStep) -> None:
        self._shared = shared
        # Last tokens of rows that the host has not read.
        self._last_tokens = np.zeros(shared.rows.max_rows, np.int64)

    def accepts(self, step: Step, packed: PackedStep) -> bool:
        return packed.plain and not self._shared.needs_logits(packed).any()

    def launch(self, step: Step, packed: PackedStep) -> Pending:
        since = time.perf_counter_ns()
        shared = self._shared
        rows = packed.sampling_rows
        errors = shared.refusals(rows)
        unread = shared.rows.owners(packed)
        if unread is None:
            unread = np.full(len(packed.tokens), -1)
        deferred = DeferredTokens(unread, rows.astype(np.int64), self._last_tokens)
        wait = shared.backend.launch(shared.batch(packed), deferred)
        launch = shared.rows.launch(packed)

        def read() -> StepResult:
            sampled = Sampled.of(wait())
            if len(rows) == len(packed.tokens):
                shared.times.overlapped(len(rows), since / 1e9, time.perf_counter())
            shared.rows.read(packed, sampled.tokens, launch)
            device_us = (time.perf_counter_ns() - since) // 1000
            return shared.result(step.step, step.incarnation, rows, sampled, errors, device_us)

        pending = Pending(read)
        shared.in_flight.add(pending)
        return pending
