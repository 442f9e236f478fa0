"""The plain executor: run the forward pass, wait for it, sample on the host. The overlapped ones are its fast twins."""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import HiddenStates, Step, StepResult
from model_worker.execution import reports
from model_worker.execution.base import DeviceStep
from model_worker.execution.flight import Pending
from model_worker.rows import PackedStep
from model_worker.sampling.sampler import Sampled, with_argmax

# Jump-forward tokens by row: a grammar leaves no choice about them.
Forced = dict[int, list[int]]


class Synchronous:
    """Takes every step, and returns it finished."""

    def __init__(self, shared: DeviceStep) -> None:
        self._shared = shared

    def accepts(self, step: Step, packed: PackedStep) -> bool:
        return True

    def launch(self, step: Step, packed: PackedStep) -> Pending:
        if self._shared.in_flight:
            self._shared.in_flight.finish()
            # The tokens that this has read are missing in what was packed.
            packed = self._shared.rows.pack(step)
        return Pending.finished(self.run(step, packed))

    def run(self, step: Step, packed: PackedStep) -> StepResult:
        """Compute a step, and return its result. No step may be in flight."""
        shared = self._shared
        started = time.perf_counter_ns()
        needed = shared.needs_logits(packed)
        if needed.all():
            logits, hidden = self._forward(packed)
            sampled, forced = self._sample(packed, logits)
            logprobs = reports.logprob_reports(shared.sampler, packed, logits, sampled)
        else:
            sampled, forced = self._greedy(packed, needed)
            hidden = None
            logprobs = sampled.reports
        shared.repeatable = False
        shared.rows.commit(packed, sampled.tokens)
        for row, tokens in forced.items():
            shared.rows.follow(row, tokens)
            shared.sampler.follow(row, tokens)
        rows = packed.sampling_rows
        shared.waited(len(rows), started)
        device_us = (time.perf_counter_ns() - started) // 1000
        result = shared.result(step.step, step.incarnation, rows, sampled, shared.refusals(rows), device_us)
        if forced:
            result = reports.with_forced(result, forced)
        if logprobs is None and hidden is None:
            return result
        return reports.with_reports(result, logprobs, hidden)

    def _forward(self, packed: PackedStep) -> tuple[torch.Tensor, HiddenStates | None]:
        backend = self._shared.backend
        batch = self._shared.batch(packed)
        if not packed.hidden:
            return self._shared.logits(batch), None
        logits, hidden = backend.hidden(batch)
        count = sum(part.count for part in packed.hidden)
        return logits, reports.hidden_states(packed.hidden, hidden[len(hidden) - count :])

    def _sample(self, packed: PackedStep, logits: torch.Tensor) -> tuple[Sampled, Forced]:
        """Return the new tokens, and the jump-forward tokens after them."""
        if not len(packed.sampling):
            return Sampled(np.empty(0, np.int32), None, None), {}
        rows = packed.sampling_rows
        sampled = self._draw(logits[: len(rows)], rows, packed.positions)
        return sampled, self._forced(rows, sampled)

    def _greedy(self, packed: PackedStep, needed: NDArray[np.bool_]) -> tuple[Sampled, Forced]:
        """Compute and sample where the argmax is enough for some rows. Returns as `_sample` does."""
        largest, logits = self._shared.greedy(self._shared.batch(packed), needed)
        rows = packed.sampling_rows
        drawn = self._draw(logits, rows[needed], packed.positions[needed]) if needed.any() else None
        sampled = with_argmax(largest, needed, drawn)
        return sampled, self._forced(rows, sampled)

    def _draw(self, logits: torch.Tensor, rows: NDArray[np.int32], positions: NDArray[np.int64]) -> Sampled:
        """Draw one token for each row, after the masks of grammars."""
        shared = self._shared
        if shared.needs_host(rows):
            # What was drawn is counted, and a grammar goes on.
            shared.repeatable = False
        if shared.masks is not None:
            shared.refused |= shared.masks.apply(logits, rows)
        return shared.sampler.sample(logits, rows, positions)

    def _forced(self, rows: NDArray[np.int32], sampled: Sampled) -> Forced:
        masks = self._shared.masks
        return {} if masks is None else masks.sampled(rows, sampled.tokens)
