"""Guesses verified: the tokens of all rows, and guesses at what follows each, are computed in one pass.

What is drawn after a token holds as long as all tokens up to it were drawn too: these are the tokens that passes one by
one would draw (depth_draw.py).

The backend must give a row the same bits whatever else is in its pass: then no answer depends on a guess.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from interfaces import LogprobReports, Step, StepResult, TokenRuns
from model_worker.drafters.several import Drafters, Guesses
from model_worker.execution import reports
from model_worker.execution.base import DeviceStep
from model_worker.execution.depth_draw import DepthDraw, Drawn, Pass
from model_worker.execution.flight import Pending
from model_worker.rows import PackedStep


class Speculation:
    """Takes steps in which each row draws a token, where the step has room for guesses that pay."""

    def __init__(self, shared: DeviceStep, drafters: Drafters, overlaps: bool) -> None:
        """`overlaps`: without guesses, greedy steps would be launched before the tokens before them are read."""
        self._shared = shared
        self._drafters = drafters
        self._overlaps = overlaps
        self._depths = DepthDraw(shared)

    def accepts(self, step: Step, packed: PackedStep) -> bool:
        """Whether guesses pay, by the text that was read so far."""
        fitting = packed.plain and packed.angles is None and packed.seen is None
        if step.ahead is None or not fitting or len(packed.tokens) != len(packed.sampling):
            return False
        room = self._room(step, packed)
        return bool(room) and self._drafters.may_guess(room, len(packed.rows), self._overlaps_without(packed))

    def launch(self, step: Step, packed: PackedStep) -> Pending:
        started = time.perf_counter_ns()
        shared = self._shared
        if shared.in_flight:
            shared.in_flight.finish()
            # The tokens that this has read are missing in what was packed.
            packed = shared.rows.pack(step)
        room = self._room(step, packed)
        guesses = self._drafters.guess(room, len(packed.rows), self._overlaps_without(packed))
        computed = self._compute(packed, guesses)
        shared.repeatable = False
        drawn = self._depths.draw(computed)
        shared.rows.commit(packed, drawn.first.tokens)
        for row, more in drawn.more.items():
            shared.rows.accept(row, np.array(more, np.int32))
        for row, forced in drawn.forced.items():
            shared.rows.follow(row, forced)
            shared.sampler.follow(row, forced)
        for row, guessed in guesses.items():
            right = len(drawn.more.get(row, ()))
            self._drafters.learn(row, guessed, drawn.seen.get(row, guessed.count), right)
            shared.counters.count(guessed.count, right)
        shared.waited(len(packed.rows) + sum(map(len, drawn.more.values())), started)
        counts = {row: guessed.count for row, guessed in guesses.items()}
        return Pending.finished(self._result(step, packed, drawn, counts, (time.perf_counter_ns() - started) // 1000))

    def _room(self, step: Step, packed: PackedStep) -> dict[int, int]:
        """Return how many guesses each row may get."""
        assert step.ahead is not None
        room = zip(packed.rows.tolist(), step.ahead.tolist(), strict=True)
        return {row: ahead for row, ahead in room if ahead and row not in self._shared.refused}

    def _overlaps_without(self, packed: PackedStep) -> bool:
        return self._overlaps and not self._shared.needs_logits(packed).any()

    def _compute(self, packed: PackedStep, guesses: Mapping[int, Guesses]) -> Pass:
        """Run the pass over the rows' tokens and guesses."""
        shared = self._shared
        counts = np.array([guesses[row].count if row in guesses else 0 for row in packed.rows.tolist()])
        lengths = counts + 1
        firsts = np.cumsum(lengths) - lengths
        tokens = np.empty(int(lengths.sum()), np.int32)
        tokens[firsts] = packed.tokens
        for row, first, count in zip(packed.rows.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            if count:
                tokens[first + 1 : first + 1 + count] = guesses[row].tokens
        several = replace(
            packed, tokens=tokens, ntok=lengths.astype(np.int32), kv_len=packed.kv_len + counts.astype(np.int32)
        )
        rows = np.repeat(packed.rows, lengths)
        positions = np.repeat(packed.positions - firsts, lengths) + np.arange(len(tokens))
        needed = shared.sampler.needs_logits(rows, positions)
        if shared.masks is not None:
            needed |= shared.masks.constrain(rows)
        largest, logits = shared.greedy(shared.batch(several, np.arange(len(tokens))), needed)
        return Pass(packed, counts, firsts, tokens, largest, needed, np.cumsum(needed) - 1, logits)

    def _result(
        self, step: Step, packed: PackedStep, drawn: Drawn, counts: Mapping[int, int], device_us: int
    ) -> StepResult:
        shared = self._shared
        rows = packed.rows
        result = shared.result(step.step, step.incarnation, rows, drawn.first, drawn.errors, device_us)
        guessed = [counts.get(row, 0) for row in result.rows.tolist()]
        result = replace(result, guessed=np.array(guessed, np.int32))
        more = {row: run for row, run in drawn.more.items() if row not in result.errors}
        if more:
            logprobs = np.array([value for row in more for value in drawn.logprobs[row]], np.float32)
            known = None if np.isnan(logprobs).all() else logprobs
            result = replace(result, more=TokenRuns.of(more), more_logprobs=known)
        if drawn.forced:
            result = reports.with_forced(result, drawn.forced)
        if not drawn.reports:
            return result
        return reports.with_reports(result, LogprobReports.joined(drawn.reports), None)
