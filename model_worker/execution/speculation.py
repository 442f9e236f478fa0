"""Guesses verified: a row's token and guesses at what follows it are computed in one pass, and right guesses are kept.

Takes steps of a single row that leave room for guesses. What is drawn after a token holds as long as all tokens up to
it were drawn too: these are the tokens that passes one by one would draw. Only sums come in another order.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from interfaces import Step, TokenRuns
from model_worker.execution.base import DeviceStep
from model_worker.execution.flight import Pending
from model_worker.execution.ngram import draft
from model_worker.rows import PackedStep
from model_worker.sampling.sampler import Sampled, with_argmax


class Speculation:
    """Guesses up to `most` tokens of a sequence from its own text."""

    def __init__(self, shared: DeviceStep, most: int) -> None:
        self._shared = shared
        self._most = most

    def accepts(self, step: Step, packed: PackedStep) -> bool:
        """Whether the text that was read so far goes on in a way that can be guessed."""
        shared = self._shared
        if step.ahead is None or shared.refused or not packed.plain or packed.angles is not None:
            return False
        single = len(packed.rows) == len(packed.tokens) == len(packed.sampling) == 1
        return single and not shared.needs_host(packed.rows) and len(self._guesses(step)) > 0

    def launch(self, step: Step, packed: PackedStep) -> Pending:
        started = time.perf_counter_ns()
        shared = self._shared
        if shared.in_flight:
            shared.in_flight.finish()
            # The tokens that this has read are missing in what was packed.
            packed = shared.rows.pack(step)
        guesses = self._guesses(step)
        sampled = self._verify(packed, guesses)
        row = int(packed.rows[0])
        more = sampled.tokens[1 : 1 + _accepted(sampled, guesses)]
        shared.rows.commit(packed, sampled.tokens[:1])
        shared.rows.accept(row, more)
        shared.counters.drafted += len(guesses)
        shared.counters.accepted += len(more)
        device_us = (time.perf_counter_ns() - started) // 1000
        result = shared.result(step.step, step.incarnation, packed.rows, sampled.only(0), {}, device_us)
        return Pending.finished(replace(result, more=TokenRuns.of({row: more})) if len(more) else result)

    def _guesses(self, step: Step) -> NDArray[np.int32]:
        """Tokens that may follow those of the step's one row that were read, as many as have room."""
        assert step.ahead is not None
        return draft(self._shared.rows.text(int(step.rows[0])), min(self._most, int(step.ahead[0])))

    def _verify(self, packed: PackedStep, guesses: NDArray[np.int32]) -> Sampled:
        """Compute the row's token and the guesses in one pass, and draw what follows each of them."""
        shared = self._shared
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
        largest, logits = shared.backend.greedy(shared.batch(several, np.arange(count)), needed)
        drawn = shared.sampler.sample(logits, rows[needed], positions[needed]) if needed.any() else None
        return with_argmax(largest, needed, drawn)


def _accepted(sampled: Sampled, guesses: NDArray[np.int32]) -> int:
    """How many tokens after the first hold: those that follow nothing but right guesses.

    One that cannot be drawn does not: the next step finds that out again, and its result says so.
    """
    right = sampled.tokens[:-1] == guesses
    if sampled.bad is not None:
        right &= ~(sampled.bad[:-1] | sampled.bad[1:])
    return len(right) if right.all() else int(np.argmin(right))
