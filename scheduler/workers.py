"""One worker as the scheduler sees it: what it can hold, what runs on it, and which steps are on their way.

Rows and blocks of a step that was sent may be given to others at once: a worker runs its steps in order, so whatever
the new owner writes comes later. Only the results need care, and the row's generation tells old from new.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from interfaces import StepResult, WorkerHello, WorkerStatus
from interfaces.messages.forced_tokens import ForcedTokens
from interfaces.messages.hidden_states import HiddenStates
from interfaces.messages.logprob_reports import LogprobReports
from scheduler.blocks import BlockPool
from scheduler.prefill_budget import PrefillBudget
from scheduler.rows import RowTable
from scheduler.sequence import Sequence
from scheduler.steady_batch import SteadyBatch
from scheduler.step_deadline import StepDeadline

R = TypeVar("R", LogprobReports, HiddenStates)

FIXED_TOKENS = 64
"""A deterministic prompt is computed in pieces of so many tokens, or of the next whole number of blocks."""


@dataclass(slots=True)
class StepInFlight:
    """Rows that will sample in a step, and whose they were when it was sent.

    `step` is the number of the next result, after which come `repeats` more. `repeating` says that its own is here
    already, so that what is left is done only if no other step comes before.

    `reporting` maps rows that may report log-probabilities or hidden states to their versions. `computing` are all
    rows of the step and `owners` their versions. Of its `tokens`, `decoding` are those of rows that have just one.
    """

    step: int
    rows: NDArray[np.int32]
    versions: NDArray[np.int64]
    reporting: dict[int, int]
    tokens: int
    decoding: int
    computing: NDArray[np.int32]
    owners: NDArray[np.int64]
    sent: float
    repeats: int = 0
    repeating: bool = False


@dataclass(slots=True)
class NewTokens:
    """Tokens and reports of one step for the rows that still have the owner they were computed for.

    `forced` are the tokens that follow those of some rows at once; `failed` says of rows why they alone failed.
    `steady` is the one whose rows these are, if there is one.
    """

    rows: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None
    steady: SteadyBatch | None = None
    reports: LogprobReports | None = None
    hidden: HiddenStates | None = None
    forced: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


class Worker:
    """State of one worker process of one epoch; a restarted worker gets a new object."""

    def __init__(self, hello: WorkerHello, max_running: int, prefix_cache: bool, stall_seconds: float) -> None:
        self.hello = hello
        self.step_deadline = StepDeadline(stall_seconds)
        self.prefill_budget = PrefillBudget()
        self.prefix_cache = prefix_cache
        self.pool = BlockPool(hello.num_blocks)
        self.rows = RowTable(min(hello.max_rows, max_running))
        self.in_flight: deque[StepInFlight] = deque()
        self.dropped: list[int] = []
        self.joined: list[Sequence] = []
        self.new_blocks: list[tuple[int, int, int]] = []
        self.steady: SteadyBatch | None = None
        self.steps = 0
        self.answered = 0
        """Steps whose results are here: repetitions that another step took the place of never come to be."""
        self.last_step = time.monotonic()

    @property
    def block_size(self) -> int:
        return self.hello.block_size

    def place(self, sequence: Sequence, replica: int, limit: int, spare: int) -> bool:
        """Gives a waiting sequence a row and the blocks of all its tokens; False when there is no room.

        `spare` blocks are kept for the growth of those that run already.
        """
        if self.rows.full:
            return False
        needed = -(-(len(sequence.tokens) + 1) // self.block_size)
        shared = self._match(sequence)
        fresh = needed - len(shared)
        if fresh + self.pool.unowned(shared) + (spare if self.rows.running else 0) > self.pool.available:
            return False
        self.pool.share(shared)
        sequence.blocks = shared + self.pool.allocate(fresh)
        cached = len(shared) * self.block_size
        if sequence.emitted == 0 and sequence.preemptions == 0:
            sequence.cached_tokens = sequence.context.cached_prefix_length = cached
            sequence.queued_us = int((time.monotonic() - sequence.arrived) * 1e6)
        sequence.tokens.set_window(cached, len(sequence.tokens), len(sequence.tokens))
        row = self.rows.take(sequence, replica, limit, cached)
        self.joined.append(sequence)
        self.new_blocks += [(row, index, block) for index, block in enumerate(sequence.blocks)]
        return True

    def remove(self, row: int) -> Sequence:
        """Takes a sequence off the worker and keeps its full blocks findable."""
        # K and V of its last token may be for a repeated step to write, which will not come.
        self._register(row, min(int(self.rows.num_computed_tokens[row]), len(self._sequence(row).tokens) - 1))
        sequence = self.rows.give_back(row)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        self._forget_unsent(row, sequence)
        return sequence

    def grow(self, row: int) -> None:
        """One more block for the sequence in `row`; the caller has made sure that one is available."""
        sequence = self._sequence(row)
        block = self.pool.allocate(1)[0]
        self.new_blocks.append((row, len(sequence.blocks), block))
        sequence.blocks.append(block)
        self.rows.num_blocks[row] = len(sequence.blocks)
        self.rows.changes += 1

    def has_room(self, steps: int) -> bool:
        """Whether it is to get one more step, of which so many may be in flight.

        While it does one again, only when that is not what it should do.
        """
        flying, steady = self.in_flight, self.steady
        if flying and flying[-1].repeats and steady is not None and steady.changes == self.rows.changes:
            return False
        return len(flying) < steps

    def sent(self, rows: NDArray[np.int32], ntok: NDArray[np.int32] | None) -> None:
        """Books a step that computes `ntok` more tokens of each row; None: one."""
        table = self.rows
        computed, known = table.num_computed_tokens[rows] + (1 if ntok is None else ntok), table.num_tokens[rows]
        table.num_computed_tokens[rows] = computed
        at_the_end = computed == known
        sampling = rows[at_the_end]
        table.num_tokens[sampling] = known[at_the_end] + 1
        self.steps += 1
        reporting: dict[int, int] = {}
        if table.any_reports:
            asking = rows[table.reports[rows]]
            reporting = dict(zip(asking.tolist(), table.version[asking].tolist(), strict=True))
        tokens, decoding = (len(rows), len(rows)) if ntok is None else (int(ntok.sum()), int((ntok == 1).sum()))
        owners = table.version[rows]
        decode = ntok is None and len(sampling) == len(rows)
        steady = self.steady = SteadyBatch.of(table, rows, self.block_size) if decode else None
        versions = owners[at_the_end] if steady is None else steady.versions
        self._fly(sampling, versions, reporting, tokens, decoding, rows, owners)
        for row in rows[ntok > 1].tolist() if ntok is not None else ():
            sequence = self._sequence(row)
            sequence.chunks += 1
            # Whoever comes next may share these blocks: its step runs after this one.
            self._register(row, min(int(table.num_computed_tokens[row]), len(sequence.tokens)))

    def repeat(self, most: int) -> tuple[NDArray[np.int32], int] | None:
        """Books one more step of the rows of the last one, if that is what comes next; None if it is not.

        Returns the rows, and how often that step is done again: `most` times at most, and never up to the end of a row,
        because whoever ends the repetitions must find it with something left to compute.
        """
        steady, table = self.steady, self.rows
        if steady is None or steady.changes != table.changes or steady.steps < 1 or not self._make_room(steady, 0):
            return None
        again = min(most, (steady.steps - 1) // 2, self.block_size) if steady.free else 0
        if again and not self._make_room(steady, again):
            again = 0
        rows, steps = steady.rows, 1 + again
        known = table.num_tokens[rows] + steps
        table.num_computed_tokens[rows], table.num_tokens[rows] = known - 1, known
        steady.steps -= steps
        steady.room -= steps
        self.steps += 1
        self._fly(rows, steady.versions, {}, len(rows), len(rows), rows, steady.versions, again)
        self.steps += again
        return rows, again

    def take_changes(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        """What the worker is to drop, and its new blocks, which it is told of with the step just booked."""
        dropped, blocks = self.dropped, self.new_blocks
        self.dropped, self.joined, self.new_blocks = [], [], []
        return dropped, blocks

    def _make_room(self, steady: SteadyBatch, further: int) -> bool:
        """Gives each row blocks for its tokens and so many further ones, at most one more each;
        False when there are not enough."""
        if further <= steady.room:
            return True
        known = self.rows.num_tokens[steady.rows]
        crossing = np.flatnonzero(known + further > steady.capacity)
        if len(crossing) > self.pool.available:
            return False
        for place in crossing[np.argsort(self.rows.order[steady.rows[crossing]])].tolist():
            self.grow(int(steady.rows[place]))
            steady.capacity[place] += self.block_size
        steady.changes = self.rows.changes
        steady.room = int((steady.capacity - known).min())
        return True

    def _fly(
        self,
        rows: NDArray[np.int32],
        versions: NDArray[np.int64],
        reporting: dict[int, int],
        tokens: int,
        decoding: int,
        computing: NDArray[np.int32],
        owners: NDArray[np.int64],
        repeats: int = 0,
    ) -> None:
        now = time.monotonic()
        self.in_flight.append(
            StepInFlight(self.steps, rows, versions, reporting, tokens, decoding, computing, owners, now, repeats)
        )

    def received(self, result: StepResult) -> NewTokens:
        """Matches a result with the step it answers; late and foreign rows are left out.

        ValueError when it answers none.
        """
        step = self._answered(result)
        begun, self.last_step = max(step.sent, self.last_step), time.monotonic()
        if result.device_us:  # else the one before took the time of both
            self.step_deadline.learn(step.tokens, self.last_step - begun)
            self.prefill_budget.learn(step.decoding, step.tokens - step.decoding, self.last_step - begun)
        reports = None if result.reports is None else self._current(result.reports, step)
        hidden = None if result.hidden is None else self._current(result.hidden, step)
        rows, tokens, logprobs = result.rows, result.tokens, result.logprobs
        steady = self.steady
        if steady is None or step.versions is not steady.versions or not steady.holds(self.rows, rows):
            steady, versions = None, step.versions
            if len(rows) != len(step.rows):
                versions = versions[np.isin(step.rows, rows)]
            current = self.rows.version[rows] == versions
            if not current.all():
                rows, tokens = rows[current], tokens[current]
                logprobs = None if logprobs is None else logprobs[current]
        forced = {} if result.forced is None else self._jump(result.forced, rows)
        failed = self._failed(result, step) if result.errors else {}
        return NewTokens(rows, tokens, logprobs, steady, reports, hidden, forced, failed)

    def _answered(self, result: StepResult) -> StepInFlight:
        """The step in flight that has this result."""
        flying, number = self.in_flight, result.step
        if len(flying) > 1 and flying[0].repeating and flying[1].step == number:
            self._take_back(flying.popleft())
        if not flying or flying[0].step != number:
            raise ValueError(f"result of step {number} answers no step in flight")
        step = flying[0]
        self.answered += 1
        if step.repeats:
            step.step += 1
            step.repeats -= 1
            step.repeating = True
            if result.last:
                self._take_back(flying.popleft())
        else:
            flying.popleft()
        return step

    def _take_back(self, step: StepInFlight) -> None:
        """The repetitions that were left of a step were not done."""
        table = self.rows
        rows = step.rows[table.version[step.rows] == step.versions]
        table.num_computed_tokens[rows] -= step.repeats + 1
        table.num_tokens[rows] -= step.repeats + 1
        if self.steady is None or not np.isin(rows, self.steady.rows).all():
            table.changes += 1  # there may be a row that seemed to have come to its limit

    def computing(self) -> list[Sequence]:
        """Those that the steps in flight are for: when the worker dies, one of them may be why."""
        table = self.rows
        rows = [step.computing[table.version[step.computing] == step.owners] for step in self.in_flight]
        return [self._sequence(row) for row in np.unique(np.concatenate(rows)).tolist()] if rows else []

    def late(self, now: float) -> float:
        """Seconds that the oldest step in flight has taken, if that is more than it may; else 0."""
        if not self.in_flight:
            return 0.0
        taken = now - max(self.in_flight[0].sent, self.last_step)
        return taken if taken > self.step_deadline.allowed(self.in_flight[0].tokens) else 0.0

    def describe(self) -> str:
        """Who this is and what it computes, for the log."""
        text = f"worker {self.hello.index} ({self.hello.device}, epoch {self.hello.epoch})"
        if not self.in_flight:
            return f"{text}, idle"
        named = [sequence.context.request_id for sequence in self.computing()]
        shown = ", ".join(named[:8]) + (f" and {len(named) - 8} more" if len(named) > 8 else "")
        head = self.in_flight[0]
        rows = f"{head.computing[:16].tolist()}{' and more' if len(head.computing) > 16 else ''}"
        return f"{text} in step {head.step} with rows {rows} of requests {shown or 'that have ended'}"

    def _failed(self, result: StepResult, step: StepInFlight) -> dict[int, str]:
        """Rows of `result.errors` that still have the owner the step was computed for."""
        owners = dict(zip(step.rows.tolist(), step.versions.tolist(), strict=True))
        return {row: text for row, text in result.errors.items() if owners.get(row) == self.rows.version[row]}

    def status(self) -> WorkerStatus:
        return WorkerStatus(
            device=self.hello.device,
            index=self.hello.index,
            epoch=self.hello.epoch,
            running=self.rows.running,
            blocks_total=self.pool.num_blocks,
            blocks_used=self.pool.used,
            blocks_cached=self.pool.cached,
            steps=self.answered,
            seconds_since_step=time.monotonic() - self.last_step if self.in_flight else 0.0,
            drafted=self.hello.drafted,
            accepted=self.hello.accepted,
        )

    def _current(self, reports: R, step: StepInFlight) -> R | None:
        """Those of rows that still have their owner; None when no entry is left. ValueError for broken columns."""
        if not reports.consistent:
            raise ValueError(f"the reports of step {step.step} do not fit together")
        versions = [step.reporting.get(row, -1) for row in reports.owners.tolist()]
        kept = self.rows.version[reports.owners] == np.array(versions, np.int64)
        return reports.select(kept) if kept.any() else None

    def _jump(self, forced: ForcedTokens, rows: NDArray[np.int32]) -> dict[int, NDArray[np.int32]]:
        """Books that rows know more tokens than were sampled; a step in flight that was to sample computes one of them.

        ValueError for broken columns.
        """
        if not forced.consistent:
            raise ValueError("the forced tokens of a step do not fit together")
        table = self.rows
        runs = {row: run for row, run in forced.runs().items() if row in rows}
        for row, run in runs.items():
            waiting = [step.rows[step.versions == table.version[step.rows]] for step in self.in_flight]
            table.changes += 1
            table.num_tokens[row] += max(0, len(run) - sum(row in sampling for sampling in waiting))
        return runs

    def _match(self, sequence: Sequence) -> list[int]:
        if not self.prefix_cache:
            return []
        reusable = sequence.reusable
        found = self.pool.match(sequence.prefix_hashes(self.block_size)[: reusable // self.block_size])
        return found[: self._shareable(sequence, len(found) * self.block_size) // self.block_size]

    @property
    def fixed_tokens(self) -> int:
        """Length of the pieces of a deterministic prompt."""
        return -(-FIXED_TOKENS // self.block_size) * self.block_size

    def _shareable(self, sequence: Sequence, tokens: int) -> int:
        """Of a deterministic sequence only whole pieces of the prompt: the same tokens later on are computed alone."""
        if not sequence.terms.deterministic:
            return tokens
        return min(tokens, sequence.prompt_len) // self.fixed_tokens * self.fixed_tokens

    def _register(self, row: int, tokens: int) -> None:
        if not self.prefix_cache:
            return
        sequence = self._sequence(row)
        full = self._shareable(sequence, tokens) // self.block_size
        for block, digest in zip(sequence.blocks[:full], sequence.prefix_hashes(self.block_size), strict=False):
            self.pool.register(block, digest)

    def _forget_unsent(self, row: int, sequence: Sequence) -> None:
        if sequence in self.joined:
            # The worker never heard of it: nothing to drop.
            self.joined.remove(sequence)
        else:
            self.dropped.append(row)
        self.new_blocks = [entry for entry in self.new_blocks if entry[0] != row]

    def _sequence(self, row: int) -> Sequence:
        sequence = self.rows.sequences[row]
        if sequence is None:
            raise ValueError(f"row {row} is free")
        return sequence
