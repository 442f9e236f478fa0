"""The steps that a worker was sent: which result answers which step, whose tokens it holds, and when a step is late.

Rows and blocks of a step in flight may be given to others at once: a worker runs its steps in order, so the new owner
writes later. Only the results need care. The version of a row says whether its owner is still the one that the step
was computed for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from interfaces import HiddenStates, LogprobReports, StepResult, TokenRuns
from scheduler.rows import RowTable
from scheduler.sequence import Sequence
from scheduler.step_deadline import StepDeadline

R = TypeVar("R", LogprobReports, HiddenStates)


@dataclass(slots=True)
class StepInFlight:
    """A step that was sent, and the versions that its rows had then."""

    number: int
    # Rows that sample a token.
    sampling: NDArray[np.int32]
    sampling_versions: NDArray[np.int64]
    # Versions of the rows that may report log-probabilities or hidden states.
    reporting: dict[int, int]
    # Tokens that the step computes; `decoding` of them belong to rows that have just one.
    tokens: int
    decoding: int
    # All rows of the step.
    rows: NDArray[np.int32]
    versions: NDArray[np.int64]
    # Time of sending on the scheduler's clock.
    sent: float
    # Positions that each of its rows may fill with guesses; None: none.
    ahead: NDArray[np.int32] | None = None


@dataclass(slots=True)
class NewTokens:
    """The result of one step for the rows that still have the owner it was computed for."""

    rows: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None
    reports: LogprobReports | None = None
    hidden: HiddenStates | None = None
    # Tokens that follow the sampled one of a row: its grammar allows no others, or they were guessed.
    following: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    # Log-probabilities of the tokens that follow, of rows that have any.
    following_logprobs: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    # Guesses that were computed, by row, and how many of them were right.
    guesses: dict[int, tuple[int, int]] = field(default_factory=dict)
    # Why single rows failed.
    failed: dict[int, str] = field(default_factory=dict)
    # Rows that the worker has lost: their sequences must leave it, and may begin anew.
    again: list[int] = field(default_factory=list)


class StepsInFlight:
    """The steps without a result, oldest first."""

    def __init__(self, table: RowTable, deadline: StepDeadline, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps: deque[StepInFlight] = deque()
        # Number of the last step that was sent.
        self.last_number = 0
        # Results received.
        self.answered = 0
        self.last_result = clock()
        self._table = table
        self._deadline = deadline
        self._clock = clock
        # Number of the last step that may have left out rows.
        self._last_partial = 0

    def __len__(self) -> int:
        return len(self.steps)

    def has_room(self, most: int) -> bool:
        """Whether the worker may get one more step, of which `most` may be in flight."""
        return len(self.steps) < most

    def add(
        self,
        sampling: NDArray[np.int32],
        sampling_versions: NDArray[np.int64],
        reporting: dict[int, int],
        tokens: int,
        decoding: int,
        rows: NDArray[np.int32],
        versions: NDArray[np.int64],
        ahead: NDArray[np.int32] | None = None,
    ) -> None:
        self.last_number += 1
        fields = sampling, sampling_versions, reporting, tokens, decoding, rows, versions, self._clock(), ahead
        self.steps.append(StepInFlight(self.last_number, *fields))

    def take(self, result: StepResult) -> tuple[StepInFlight, float | None]:
        """Take out the step that has this result. Returns it and the seconds it took; None if rows were not computed.

        ValueError if the oldest step in flight is another.
        """
        if not self.steps or self.steps[0].number != result.step:
            raise ValueError(f"result of step {result.step} answers no step in flight")
        step = self.steps.popleft()
        self.answered += 1
        begun = max(step.sent, self.last_result)
        self.last_result = self._clock()
        if result.again is not None:
            # Those that were sent meanwhile are computed without the rows that are lost.
            self._last_partial = self.last_number
        if step.number <= self._last_partial:
            return step, None
        seconds = self.last_result - begun
        self._deadline.learn(step.tokens, seconds)
        return step, seconds

    def match(self, result: StepResult, step: StepInFlight) -> NewTokens:
        """The result of `step` without tokens of rows that have failed or ended, or belong to others now.

        ValueError for broken columns.
        """
        failed = self._failed(result, step) if result.errors else {}
        reports = None if result.reports is None else self._of_owners(result.reports, step)
        hidden = None if result.hidden is None else self._of_owners(result.hidden, step)
        rows = result.rows
        tokens = result.tokens
        logprobs = result.logprobs
        versions = step.sampling_versions
        if len(rows) != len(step.sampling):
            versions = versions[np.isin(step.sampling, rows)]
        current = self._table.version[rows] == versions
        if failed:
            current &= ~np.isin(rows, list(failed))
        if not current.all():
            rows = rows[current]
            tokens = tokens[current]
            logprobs = None if logprobs is None else logprobs[current]
        following = {} if step.ahead is None else self._accept(result.more, step, step.ahead, rows)
        more_logprobs = {row: run for row, run in _logprobs_of(result).items() if row in following}
        guesses = _guesses_of(result, following)
        if result.forced is not None:
            for row, run in self._fast_forward(result.forced, rows).items():
                following[row] = np.concatenate([following[row], run]) if row in following else run
        again = [] if result.again is None else self._again(result.again, step)
        return NewTokens(rows, tokens, logprobs, reports, hidden, following, more_logprobs, guesses, failed, again)

    def computing(self) -> list[Sequence]:
        """The sequences in the steps in flight. If the worker dies, one of them may be the reason."""
        version = self._table.version
        rows = [step.rows[version[step.rows] == step.versions] for step in self.steps]
        return [self._table.sequence(row) for row in np.unique(np.concatenate(rows)).tolist()] if rows else []

    def waited(self) -> tuple[float, float] | None:
        """Seconds that the oldest step has taken, and seconds it is allowed; None if there is none."""
        if not self.steps:
            return None
        taken = self._clock() - max(self.steps[0].sent, self.last_result)
        return taken, self._deadline.allowed(self.steps[0].tokens)

    def grant_grace(self) -> None:
        """Count the time of the oldest step from now."""
        self.last_result = self._clock()

    def _of_owners(self, reports: R, step: StepInFlight) -> R | None:
        """Entries of rows that still have their owner; None if there are none. ValueError for broken columns."""
        if not reports.consistent:
            raise ValueError(f"the reports of step {step.number} do not fit together")
        versions = [step.reporting.get(row, -1) for row in reports.owners.tolist()]
        kept = self._table.version[reports.owners] == np.array(versions, np.int64)
        return reports.select(kept) if kept.any() else None

    def _fast_forward(self, forced: TokenRuns, rows: NDArray[np.int32]) -> dict[int, NDArray[np.int32]]:
        """Update the columns for tokens that follow the sampled ones. ValueError for broken columns.

        A step in flight that was to sample for such a row computes one of these tokens instead.
        """
        if not forced.consistent:
            raise ValueError("the forced tokens of a step do not fit together")
        table = self._table
        runs = {row: run for row, run in forced.runs().items() if row in rows}
        for row, run in runs.items():
            expected = [step.sampling[step.sampling_versions == table.version[step.sampling]] for step in self.steps]
            table.num_tokens[row] += max(0, len(run) - sum(row in sampling for sampling in expected))
        return runs

    def _accept(
        self, more: TokenRuns | None, step: StepInFlight, ahead: NDArray[np.int32], rows: NDArray[np.int32]
    ) -> dict[int, NDArray[np.int32]]:
        """Update the columns for right guesses, which are computed already. ValueError for broken columns."""
        table = self._table
        current = table.version[step.rows] == step.versions
        table.ahead[step.rows[current]] -= ahead[current]
        if more is None:
            return {}
        granted = dict(zip(step.rows.tolist(), ahead.tolist(), strict=True))
        if not more.consistent or any(len(run) > granted.get(row, 0) for row, run in more.runs().items()):
            raise ValueError(f"the guesses of step {step.number} do not fit it")
        left = set(rows.tolist())
        runs = {row: run for row, run in more.runs().items() if row in left}
        for row, run in runs.items():
            table.num_computed_tokens[row] += len(run)
            table.num_tokens[row] += len(run)
        return runs

    def _failed(self, result: StepResult, step: StepInFlight) -> dict[int, str]:
        """Errors of the rows that still have their owner."""
        versions = dict(zip(step.rows.tolist(), step.versions.tolist(), strict=True))
        return {row: text for row, text in result.errors.items() if versions.get(row) == self._table.version[row]}

    def _again(self, lost: NDArray[np.int32], step: StepInFlight) -> list[int]:
        """Those rows that still have their owner. ValueError for rows that are not in the step."""
        versions = dict(zip(step.rows.tolist(), step.versions.tolist(), strict=True))
        if not versions.keys() >= set(lost.tolist()):
            raise ValueError(f"step {step.number} has lost rows that it did not have")
        return [row for row in lost.tolist() if versions[row] == self._table.version[row]]


def _guesses_of(result: StepResult, right: dict[int, NDArray[np.int32]]) -> dict[int, tuple[int, int]]:
    """How many guesses were computed by row, and how many were right. ValueError for broken columns."""
    if result.guessed is None:
        return {}
    pairs = zip(result.rows.tolist(), result.guessed.tolist(), strict=True)
    return {row: (count, len(right.get(row, ()))) for row, count in pairs if count}


def _logprobs_of(result: StepResult) -> dict[int, NDArray[np.float32]]:
    """Log-probabilities of right guesses, by row. ValueError for broken columns."""
    more = result.more
    logprobs = result.more_logprobs
    if more is None or logprobs is None:
        return {}
    if len(logprobs) != len(more.tokens):
        raise ValueError(f"step {result.step} has {len(logprobs)} log-probabilities of {len(more.tokens)} guesses")
    return dict(zip(more.rows.tolist(), np.split(logprobs, np.cumsum(more.counts)[:-1]), strict=True))
