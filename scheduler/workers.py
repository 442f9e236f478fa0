"""One worker as the scheduler sees it: what it can hold, what runs on it, and what changes with its next step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from interfaces import GENERATE, PoolingTask, StepResult, WorkerHello
from scheduler.batches_in_flight import BatchesInFlight
from scheduler.blocks import BlockPool
from scheduler.image_rows import ImageRows
from scheduler.in_flight import NewTokens, StepsInFlight
from scheduler.limits import MIN_AWAITED_TOKENS
from scheduler.painting import Painting
from scheduler.prefill_budget import PrefillBudget
from scheduler.row_beginnings import Beginning, RowBeginnings
from scheduler.row_changes import RowChanges
from scheduler.rows import RowTable
from scheduler.sequence import KvElsewhere, Sequence
from scheduler.step_deadline import StepDeadline
from scheduler.worker_adapters import WorkerAdapters
from scheduler.worker_weights import WorkerWeights


class Worker:
    """State of one worker process of one epoch; a restarted worker gets a new object."""

    def __init__(
        self,
        hello: WorkerHello,
        max_running: int | None,
        prefix_cache: bool,
        stall_seconds: float,
        min_awaited_tokens: int = MIN_AWAITED_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hello = hello
        # Whether it is on another machine: it maps no shared memory of this one, and may be cut off.
        self.remote = False
        self.prefill_budget = PrefillBudget()
        self.pool = BlockPool(hello.num_blocks)
        self.rows = RowTable(min(hello.max_rows, max_running or hello.max_rows))
        self.changes = RowChanges(self.rows)
        self.images = ImageRows(self.rows, hello.images, clock)
        shared = self.rows, self.pool, self.images, self.prefill_budget
        self.beginnings = RowBeginnings(hello, prefix_cache, *shared, min_awaited_tokens, clock)
        self.arrivals = self.beginnings.arrivals
        self.prefix_waits = self.beginnings.prefix_waits
        self.spilled_rows = self.beginnings.spilled_rows
        self.spill = self.spilled_rows.spill
        # It is asked to end: it gets nothing more to compute, and its sequences go elsewhere.
        self.leaving = False
        # It was told that it may end.
        self.dismissed = False
        self.in_flight = StepsInFlight(self.rows, StepDeadline(stall_seconds), clock)
        numbers = itertools.count(1)
        self.batches = BatchesInFlight(StepDeadline(stall_seconds), clock, numbers)
        # Those that it computes beside its steps and other batches.
        self.beside = BatchesInFlight(StepDeadline(stall_seconds), clock, numbers)
        # Whether it computes texts in one pass.
        self.pools = any(task != GENERATE for task in hello.tasks)
        # Whether it speaks: a sentence takes as long as many texts, and the first one is heard before the last is made.
        self.speaks = bool({PoolingTask.SPEAK, PoolingTask.DECODE_SPEECH}.intersection(hello.tasks))
        # The images that it paints, if it does; they take many passes each.
        self.painting = Painting(hello.device) if PoolingTask.PAINT in hello.tasks else None
        self.adapters = WorkerAdapters(hello.adapter_memory, self.rows, clock, lambda: self.batches.adapters)
        self.weights = WorkerWeights(hello.weights, clock)
        self._clock = clock

    @property
    def block_size(self) -> int:
        return self.hello.block_size

    def match_tokens(self, sequence: Sequence) -> tuple[int, int]:
        """Number of tokens of a waiting sequence that need no computing here, and what that costs, in tokens, too."""
        sequence.begin_with(self.weights.number)
        return self.beginnings.match_tokens(sequence)

    def place(self, sequence: Sequence, replica: int, limit: int, spare: int) -> bool:
        """Give a waiting sequence a row, the blocks of all its tokens, and its adapter. False if there is no room.

        `spare` blocks are kept for the growth of the sequences that run already.
        """
        found = self.room_for(sequence, spare)
        if found is None:
            return False
        slots = self.beginnings.give_blocks(sequence, found, self._fresh_blocks(sequence, found))
        if sequence.emitted == 0 and sequence.preemptions == 0 and sequence.elsewhere is None:
            sequence.queued_us = int((self._clock() - sequence.arrived) * 1e6)
        cached = len(found.shared) * self.block_size
        row = self.rows.take(sequence, replica, limit, cached, self.beginnings.runs_alone(sequence))
        self.images.placed(sequence, cached)
        self.adapters.placed(sequence)
        self.changes.join(sequence)
        self.beginnings.begin(row, found, slots)
        return True

    def room_for(self, sequence: Sequence, spare: int) -> Beginning | None:
        """What a sequence begins with if it is placed now; `spare` is as in `place`. None if there is no room."""
        if self.rows.full:
            return None
        if sequence.adapter is not None and not self.adapters.has_room(sequence.adapter):
            return None
        sequence.begin_with(self.weights.number)
        found = self.beginnings.find(sequence)
        kept = spare if self.rows.running else 0
        wanted = self._fresh_blocks(sequence, found) + self.pool.unowned(found.owned) + kept
        return found if wanted <= self.pool.available else None

    def give_away(self, row: int) -> Sequence:
        """Take a sequence off a worker that leaves. Its blocks stay as they are: nothing more is computed here."""
        sequence = self.rows.sequence(row)
        here = self.kv_of(row)
        if here is not None and (sequence.elsewhere is None or here.tokens > sequence.elsewhere.tokens):
            sequence.elsewhere = here
        return self.remove(row)

    def kv_of(self, row: int) -> KvElsewhere | None:
        """What a sequence has here, the steps in flight included, if another worker can use it."""
        sequence = self.rows.sequence(row)
        tokens = int(self.rows.num_computed_tokens[row])
        if not self.hello.kv_form or not tokens or sequence.mixed or sequence.images:
            return None
        blocks = sequence.blocks[: -(-tokens // self.block_size)]
        return KvElsewhere(self.hello.index, self.hello.epoch, blocks, tokens, self.hello.kv_form, sequence.weights)

    def take_orphans(self) -> list[Sequence]:
        """Take off the sequences that wait for blocks which nothing fills any more. They have computed nothing."""
        if not self.beginnings.any_waits:
            return []
        taken = [self.remove(row) for row in self.spilled_rows.late()]
        for row in self.arrivals.late():
            sequence = self.remove(row)
            sequence.elsewhere = None
            taken.append(sequence)
        while orphans := self.prefix_waits.orphans():
            taken += [self.remove(row) for row in orphans]
        return taken

    @property
    def must_hear(self) -> bool:
        """Whether the worker must get a step although nothing is computed: it encodes images, or moves blocks."""
        encodes = bool(self.images.takes) and any(sequence.images for sequence in self.changes.joining)
        return encodes or self.spill.has_orders

    def remove(self, row: int) -> Sequence:
        """Take a sequence off the worker. Its full blocks stay in the prefix cache."""
        # A step in flight may compute its last token, and right guesses beyond its end.
        computed = int(self.rows.num_computed_tokens[row])
        self.beginnings.register(row, min(computed, len(self.rows.sequence(row).tokens)))
        self.beginnings.settle_waits()
        self.prefix_waits.forget(row)
        sequence = self.rows.give_back(row)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        self.changes.leave(row, sequence)
        return sequence

    def distrust(self, row: int) -> None:
        """A sequence fails here: what was computed of it may be wrong or missing, and is not put into the prefix cache.

        What it found there stays, and so does what others share already.
        """
        sequence = self.rows.sequence(row)
        self.rows.num_computed_tokens[row] = 0
        self.pool.forget(sequence.blocks[sequence.began_with // self.block_size :])

    def change_weights(self, number: int) -> None:
        """Compute with version `number` from the next step on. The K and V of rows stay, and are shared no more."""
        self.weights.number = number
        self.weights.current = False
        self.forget_prefixes()
        for row in self.rows.occupied().tolist():
            self.rows.sequence(row).mixed = True

    def forget_prefixes(self) -> None:
        """Drop every cached prefix that no row has, here and beside the KV cache."""
        self.pool.forget_cached()
        self.spill.clear()

    def grow(self, row: int) -> None:
        """Give the sequence in `row` one more block. The caller has made sure that one is available."""
        sequence = self.rows.sequence(row)
        block = self.pool.allocate(1)[0]
        self.changes.grow(row, len(sequence.blocks), block)
        sequence.blocks.append(block)
        self.rows.num_blocks[row] = len(sequence.blocks)

    def send(
        self, rows: NDArray[np.int32], ntok: NDArray[np.int32] | None, most_guesses: int = 0
    ) -> NDArray[np.int32] | None:
        """Update the columns for a step that computes `ntok` more tokens of each row; None means one.

        Returns the number of further positions, at most `most_guesses`, that each row may fill with guesses. None if no
        row may, as beside prompts.
        """
        table = self.rows
        computed = table.num_computed_tokens[rows] + (1 if ntok is None else ntok)
        known = table.num_tokens[rows]
        table.num_computed_tokens[rows] = computed
        at_the_end = computed == known
        sampling = rows[at_the_end]
        table.num_tokens[sampling] = known[at_the_end] + 1
        reporting: dict[int, int] = {}
        if table.any_reports:
            asking = rows[table.reports[rows]]
            reporting = dict(zip(asking.tolist(), table.version[asking].tolist(), strict=True))
        versions = table.version[rows]
        tokens = len(rows) if ntok is None else int(ntok.sum())
        decoding = len(rows) if ntok is None else int((ntok == 1).sum())
        guesses = most_guesses > 0 and self.hello.guesses and ntok is None and 0 < len(rows) == len(sampling)
        ahead = self._make_room_ahead(rows, most_guesses) if guesses else None
        self.in_flight.add(sampling, versions[at_the_end], reporting, tokens, decoding, rows, versions, ahead)
        for row in rows[ntok > 1].tolist() if ntok is not None else ():
            sequence = table.sequence(row)
            sequence.chunks += 1
            # A sequence that is placed next may share these blocks: its step runs after this one.
            self.beginnings.register(row, min(int(table.num_computed_tokens[row]), len(sequence.tokens)))
        return ahead

    def receive(self, result: StepResult) -> NewTokens:
        """Match a result with its step and learn from the time it took.

        Late rows and those of other owners are left out. ValueError if no step in flight has this result.
        """
        step, seconds = self.in_flight.take(result)
        self.batches.grant_grace()
        if step.tokens and seconds is not None:
            self.prefill_budget.learn(step.decoding, step.tokens - step.decoding, seconds)
        return self.in_flight.match(result, step)

    @property
    def computing(self) -> bool:
        """Whether a step or a batch is in flight, but for batches that leave the worker free to answer."""
        return bool(self.in_flight.steps or self.batches.batches)

    def lateness(self) -> tuple[float, float] | None:
        """Seconds that the oldest step or batch has taken, and seconds it was allowed; None while it is not late."""
        beside = self.beside.waited()
        if beside is not None and beside[0] > beside[1]:
            return beside
        waits = [wait for wait in (self.in_flight.waited(), self.batches.waited()) if wait is not None]
        if not waits:
            return None
        # Which of the two the worker computes first is not known here.
        taken = min(seconds for seconds, _ in waits)
        allowed = sum(seconds for _, seconds in waits)
        return (taken, allowed) if taken > allowed else None

    def grant_grace(self) -> None:
        """Count the time of the oldest step and batch from now."""
        self.in_flight.grant_grace()
        self.batches.grant_grace()
        self.beside.grant_grace()
        self.images.grant_grace()
        self.adapters.grant_grace()
        self.weights.grant_grace()

    def describe(self) -> str:
        """The worker and what it computes, for the log."""
        text = f"worker {self.hello.index} ({self.hello.device}, epoch {self.hello.epoch})"
        batches = [lane.describe() for lane in (self.batches, self.beside) if lane.batches]
        text = f"{text} {' and '.join(batches)}" if batches else text
        if not self.in_flight.steps:
            return text if batches else f"{text}, idle"
        named = [sequence.context.request_id for sequence in self.in_flight.computing()]
        shown = ", ".join(named[:8]) + (f" and {len(named) - 8} more" if len(named) > 8 else "")
        head = self.in_flight.steps[0]
        rows = f"{head.rows[:16].tolist()}{' and more' if len(head.rows) > 16 else ''}"
        return f"{text} in step {head.number} with rows {rows} of requests {shown or 'that have ended'}"

    def _fresh_blocks(self, sequence: Sequence, found: Beginning) -> int:
        """Blocks that a sequence needs beside those that it begins with, one token ahead."""
        return -(-(len(sequence.tokens) + 1) // self.block_size) - len(found.owned)

    def _make_room_ahead(self, rows: NDArray[np.int32], most: int) -> NDArray[np.int32] | None:
        """Give rows blocks for up to `most` positions beyond the steps in flight. Returns how many each has.

        The blocks that the other rows may need next are left. None if no row has any.
        """
        table = self.rows
        end = table.num_computed_tokens[rows] + table.ahead[rows]
        wanted = np.clip(table.limit[rows] - end - 1, 0, most)
        spare = table.running - 1
        for i in np.flatnonzero(table.num_blocks[rows] * self.block_size < end + wanted).tolist():
            row = int(rows[i])
            while table.num_blocks[row] * self.block_size < end[i] + wanted[i] and self.pool.available > spare:
                self.grow(row)
        ahead: NDArray[np.int32] = np.clip(table.num_blocks[rows] * self.block_size - end, 0, wanted)
        table.ahead[rows] += ahead
        return ahead if ahead.any() else None
