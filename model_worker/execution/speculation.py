"""Guesses verified: the tokens of all rows, and guesses at what follows each, are computed in one pass.

What is drawn after a token holds as long as all tokens up to it were drawn too: these are the tokens that passes one by
one would draw. The ordinary sampler draws them by depth: first one token of each row, then one of those whose guess was
just drawn, and so on. So penalties, grammars and processors see the history that they would have seen.

The backend must give a row the same bits whatever else is in its pass: then no answer depends on a guess.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import LogprobReports, Step, StepResult, TokenRuns
from model_worker.drafters.several import Drafters, Guesses
from model_worker.execution import reports
from model_worker.execution.base import DeviceStep
from model_worker.execution.flight import Pending
from model_worker.rows import PackedStep
from model_worker.sampling.sampler import Sampled, with_argmax


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass whose row i has its token and `counts[i]` guesses, at packed tokens `firsts[i]` and following.

    `largest` i64[T] and the rows of `logits` belong to packed tokens; `places` i64[T] says which row, where a token
    `needed` i64[T] more than the largest.
    """

    packed: PackedStep
    counts: NDArray[np.int64]
    firsts: NDArray[np.int64]
    tokens: NDArray[np.int32]
    largest: NDArray[np.int64]
    needed: NDArray[np.bool_]
    places: NDArray[np.int64]
    logits: torch.Tensor


@dataclass(slots=True)
class _Drawn:
    """What was drawn: `first` are the tokens of all rows but those with `errors`; the others follow right guesses."""

    first: Sampled
    errors: dict[int, str]
    more: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    forced: dict[int, list[int]] = field(default_factory=dict)
    reports: list[LogprobReports] = field(default_factory=list)
    # Guesses of a row of which it is known that they were right, where nothing is known of the next one.
    seen: dict[int, int] = field(default_factory=dict)


class Speculation:
    """Takes steps in which each row draws a token, where the step has room for guesses that pay."""

    def __init__(self, shared: DeviceStep, drafters: Drafters, overlaps: bool) -> None:
        """`overlaps`: without guesses, greedy steps would be launched before the tokens before them are read."""
        self._shared = shared
        self._drafters = drafters
        self._overlaps = overlaps

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
        drawn = self._draw(computed)
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

    def _compute(self, packed: PackedStep, guesses: Mapping[int, Guesses]) -> _Pass:
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
        return _Pass(packed, counts, firsts, tokens, largest, needed, np.cumsum(needed) - 1, logits)

    def _draw(self, computed: _Pass) -> _Drawn:
        """Draw by depth what follows the rows' tokens, and their guesses as far as they are right."""
        rows = computed.packed.rows
        alive = np.arange(len(rows))
        first = self._draw_at(computed, alive, 0)
        drawn = _Drawn(first, self._shared.refusals(rows))
        self._follow(drawn, rows, drawn.first)
        last = drawn.first
        depth = 0
        while True:
            kept = self._right(computed, alive, depth, last, drawn)
            alive = alive[kept]
            if not len(alive):
                return drawn
            depth += 1
            last = self._draw_at(computed, alive, depth)
            holds = self._holding(rows[alive], depth, last, drawn)
            last = _part(last, rows[alive], holds)
            alive = alive[holds]
            for i, (row, token) in enumerate(zip(rows[alive].tolist(), last.tokens.tolist(), strict=True)):
                drawn.more.setdefault(row, []).append(token)
                logprob = np.nan if last.logprobs is None else float(last.logprobs[i])
                drawn.logprobs.setdefault(row, []).append(logprob)
            self._follow(drawn, rows[alive], last)

    def _draw_at(self, computed: _Pass, alive: NDArray[np.int64], depth: int) -> Sampled:
        """Draw what follows the tokens at a depth, for the rows with these indices."""
        shared = self._shared
        at = computed.firsts[alive] + depth
        needed = computed.needed[at]
        rows = computed.packed.rows[alive][needed]
        sampled = None
        if len(rows):
            positions = computed.packed.positions[alive][needed] + depth
            logits = computed.logits[torch.from_numpy(computed.places[at[needed]])]
            if shared.masks is not None:
                shared.refused |= shared.masks.apply(logits, rows)
            sampled = shared.sampler.sample(logits, rows, positions)
        return with_argmax(computed.largest[at], needed, sampled)

    def _follow(self, drawn: _Drawn, rows: NDArray[np.int32], sampled: Sampled) -> None:
        """Let the grammars of these rows follow their tokens, and keep the reports."""
        if sampled.reports is not None:
            drawn.reports.append(sampled.reports)
        if self._shared.masks is not None:
            drawn.forced |= self._shared.masks.sampled(rows, sampled.tokens)

    def _right(
        self, computed: _Pass, alive: NDArray[np.int64], depth: int, sampled: Sampled, drawn: _Drawn
    ) -> NDArray[np.bool_]:
        """Return which of these rows have a guess at the next depth that was drawn just now, and may go on."""
        rows = computed.packed.rows[alive].tolist()
        guessed = computed.counts[alive] > depth
        following = np.minimum(computed.firsts[alive] + depth + 1, len(computed.tokens) - 1)
        right: NDArray[np.bool_] = guessed & (computed.tokens[following] == sampled.tokens)
        if sampled.bad is not None:
            right &= ~sampled.bad
        stopped = [row in drawn.forced or row in self._shared.refused for row in rows]
        for i in np.flatnonzero(stopped).tolist():
            right[i] = False
            drawn.seen[rows[i]] = depth
        return right

    def _holding(self, rows: NDArray[np.int32], depth: int, sampled: Sampled, drawn: _Drawn) -> NDArray[np.bool_]:
        """Return which of these rows drew a token after a right guess.

        One that cannot be drawn is an error of the next step, whose result says so.
        """
        shared = self._shared
        for row in rows[sampled.bad].tolist() if sampled.bad is not None else ():
            shared.refused.setdefault(row, shared.sampler.why_bad(row))
        failed = np.array([row in shared.refused for row in rows.tolist()], np.bool_)
        for row in rows[failed].tolist():
            drawn.seen[row] = depth - 1
        return ~failed

    def _result(
        self, step: Step, packed: PackedStep, drawn: _Drawn, counts: Mapping[int, int], device_us: int
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


def _part(sampled: Sampled, rows: NDArray[np.int32], kept: NDArray[np.bool_]) -> Sampled:
    """Return the choices, of these rows, of those that are kept."""
    if kept.all():
        return sampled
    found = sampled.reports
    return Sampled(
        tokens=sampled.tokens[kept],
        logprobs=None if sampled.logprobs is None else sampled.logprobs[kept],
        bad=None,
        reports=None if found is None else found.select(np.isin(found.owners, rows[kept])),
    )
