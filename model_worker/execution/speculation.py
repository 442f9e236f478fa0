"""Guesses verified: a row's token and what may follow it are computed in one pass, and right guesses are kept.

Takes steps of a single row that are to be repeated anyway: one pass is then all repetitions whose tokens were guessed
right. What was drawn after a token holds as long as all tokens up to it were drawn too. So they are the tokens that
passes one by one would draw; only sums come in another order.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from interfaces import Step
from model_worker.execution.base import DeviceStep
from model_worker.execution.flight import Pending
from model_worker.execution.ngram import draft
from model_worker.rows import PackedStep
from model_worker.sampling.sampler import Sampled, with_largest


class Speculation:
    """Guesses up to `most` tokens of a sequence from its own text. The backend must have `greedy`."""

    def __init__(self, shared: DeviceStep, most: int) -> None:
        self._shared = shared
        self._most = most
        # Of the step that was accepted last.
        self._guesses = np.empty(0, np.int32)

    def accepts(self, step: Step, packed: PackedStep) -> bool:
        shared = self._shared
        if shared.in_flight or not step.repeats or shared.refused or not packed.plain or packed.angles is not None:
            return False
        single = len(packed.rows) == len(packed.tokens) == len(packed.sampling) == 1
        if not single or shared.needs_host(packed.rows):
            return False
        self._guesses = self.propose(packed, 0, step.repeats)
        return len(self._guesses) > 0

    def propose(self, packed: PackedStep, read: int, most: int) -> NDArray[np.int32]:
        """Up to `most` tokens that may follow the step's one row, of which `read` further tokens were read."""
        text = self._shared.rows.text(int(packed.rows[0]), int(packed.positions[0]) + read)
        return draft(text, min(self._most, most))

    def may_guess(self, packed: PackedStep, read: int) -> bool:
        """Whether anything may follow the step's one row, of which `read` further tokens were read."""
        return len(self.propose(packed, read, self._most)) > 0

    def launch(self, step: Step, packed: PackedStep) -> Pending:
        started = time.perf_counter_ns()
        shared = self._shared
        guesses = self._guesses
        sampled = self._verify(packed, guesses)
        accepted = _accepted(sampled, guesses)
        shared.rows.drafted_step(packed, sampled.tokens[:accepted])
        shared.counters.drafted += len(guesses)
        shared.counters.accepted += accepted - 1
        # The others came with the first one.
        times = [(time.perf_counter_ns() - started) // 1000] + [0] * (accepted - 1)
        return Pending.finished(
            *(
                shared.result(step.step + i, step.incarnation, packed.rows, sampled.only(i), {}, device_us)
                for i, device_us in enumerate(times)
            )
        )

    def _verify(self, packed: PackedStep, guesses: NDArray[np.int32]) -> Sampled:
        """Computes the row's token and the guesses in one pass, and draws what follows each of them."""
        shared = self._shared
        greedy = shared.backend.greedy
        assert greedy is not None
        count = 1 + len(guesses)
        several = replace(
            packed,
            tokens=np.concatenate([packed.tokens, guesses]),
            ntok=packed.ntok + len(guesses),
            kv_len=packed.kv_len + len(guesses),
        )
        rows = np.repeat(packed.rows, count)
        positions = packed.positions + np.arange(count)
        needed = shared.sampler.needs_logits(rows, positions)
        largest, logits = greedy(shared.batch(several, np.arange(count)), needed)
        drawn = shared.sampler.sample(logits, rows[needed], positions[needed]) if needed.any() else None
        return with_largest(largest, needed, drawn)


def _accepted(sampled: Sampled, guesses: NDArray[np.int32]) -> int:
    """How many of the drawn tokens hold: those that follow nothing but right guesses."""
    wrong = sampled.tokens[:-1] != guesses
    if sampled.bad is not None:
        wrong |= sampled.bad[:-1]
    return int(np.argmax(wrong)) + 1 if wrong.any() else len(sampled.tokens)
