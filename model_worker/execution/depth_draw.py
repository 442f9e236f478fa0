"""The tokens after a pass over guesses, drawn by depth: first one of each row, then one of those whose guess was drawn.

The ordinary sampler draws them, so penalties, grammars and processors see the history that passes one by one would see.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import LogprobReports
from model_worker.execution.base import DeviceStep
from model_worker.rows import PackedStep
from model_worker.sampling.sampler import Sampled, with_argmax


@dataclass(frozen=True, slots=True)
class Pass:
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
class Drawn:
    """What was drawn: `first` are the tokens of all rows but those with `errors`; the others follow right guesses."""

    first: Sampled
    errors: dict[int, str]
    more: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    forced: dict[int, list[int]] = field(default_factory=dict)
    reports: list[LogprobReports] = field(default_factory=list)
    # Guesses of a row of which it is known that they were right, where nothing is known of the next one.
    seen: dict[int, int] = field(default_factory=dict)


class DepthDraw:
    """Draws from passes with the rows' sampler and masks."""

    def __init__(self, shared: DeviceStep) -> None:
        self._shared = shared

    def draw(self, computed: Pass) -> Drawn:
        """Draw by depth what follows the rows' tokens, and their guesses as far as they are right."""
        rows = computed.packed.rows
        alive = np.arange(len(rows))
        first = self._draw_at(computed, alive, 0)
        drawn = Drawn(first, self._shared.refusals(rows))
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

    def _draw_at(self, computed: Pass, alive: NDArray[np.int64], depth: int) -> Sampled:
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

    def _follow(self, drawn: Drawn, rows: NDArray[np.int32], sampled: Sampled) -> None:
        """Let the grammars of these rows follow their tokens, and keep the reports."""
        if sampled.reports is not None:
            drawn.reports.append(sampled.reports)
        if self._shared.masks is not None:
            drawn.forced |= self._shared.masks.sampled(rows, sampled.tokens)

    def _right(
        self, computed: Pass, alive: NDArray[np.int64], depth: int, sampled: Sampled, drawn: Drawn
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

    def _holding(self, rows: NDArray[np.int32], depth: int, sampled: Sampled, drawn: Drawn) -> NDArray[np.bool_]:
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
