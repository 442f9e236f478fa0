"""One worker as the scheduler sees it: what it can hold, what runs on it, and what changes with its next step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from interfaces import GENERATE, KvMoved, PoolingTask, StepResult, WorkerHello, WorkerStatus
from scheduler.arrivals import Arrival, Arrivals
from scheduler.batches_in_flight import BatchesInFlight
from scheduler.blocks import BlockPool
from scheduler.image_rows import ImageRows
from scheduler.in_flight import NewTokens, StepsInFlight
from scheduler.kv_log import KvLog
from scheduler.limits import MIN_AWAITED_TOKENS
from scheduler.painting import Painting
from scheduler.prefill_budget import PrefillBudget
from scheduler.prefix_waits import Fill, PrefixWaits
from scheduler.rows import RowTable
from scheduler.sequence import KvElsewhere, Sequence
from scheduler.spill import Load
from scheduler.spilled_rows import SpilledRows
from scheduler.step_deadline import StepDeadline
from scheduler.worker_adapters import WorkerAdapters
from scheduler.worker_weights import WorkerWeights

# Tokens in each piece of the prompt of a row that runs alone, rounded up to whole blocks.
FIXED_TOKENS = 64


class Worker:
    """State of one worker process of one epoch; a restarted worker gets a new object."""

    def __init__(
        self,
        hello: WorkerHello,
        max_running: int,
        prefix_cache: bool,
        stall_seconds: float,
        min_awaited_tokens: int = MIN_AWAITED_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hello = hello
        # Whether it is on another machine: it maps no shared memory of this one, and may be cut off.
        self.remote = False
        self.prefix_cache = prefix_cache
        self.min_awaited_tokens = min_awaited_tokens
        self.prefill_budget = PrefillBudget()
        self.pool = BlockPool(hello.num_blocks)
        self.rows = RowTable(min(hello.max_rows, max_running))
        shape = hello.block_size, self.pool, self.rows, self.prefill_budget, clock
        # Rows whose K and V come from beside the KV cache, and from other workers.
        self.spilled_rows = SpilledRows(hello.spill_slots if prefix_cache else 0, *shape)
        self.spill = self.spilled_rows.spill
        self.arrivals = Arrivals(hello.kv_form, *shape)
        # It is asked to end: it gets nothing more to compute, and its sequences go elsewhere.
        self.leaving = False
        # It was told that it may end.
        self.dismissed = False
        self.prefix_waits = PrefixWaits(self.rows)
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
        self.images = ImageRows(self.rows, hello.images, clock)
        self.adapters = WorkerAdapters(hello.adapter_memory, self.rows, clock, lambda: self.batches.adapters)
        self.weights = WorkerWeights(hello.weights, clock)
        self.dropped: list[int] = []
        # Sequences that the worker has not been sent.
        self.joined: list[Sequence] = []
        # The changes of its prefix cache, where they are published.
        self.kv_log: KvLog | None = None
        # Tokens of the sequences that were placed here, and those of them that were not computed again.
        self.placed_tokens = 0
        self.saved_tokens = 0
        self.new_blocks: list[tuple[int, int, int]] = []
        self._clock = clock

    @property
    def block_size(self) -> int:
        return self.hello.block_size

    @property
    def fixed_tokens(self) -> int:
        """Length of the pieces of the prompt of a row that runs alone."""
        return -(-FIXED_TOKENS // self.block_size) * self.block_size

    def runs_alone(self, sequence: Sequence) -> bool:
        """Whether a sequence shares no forward pass here, so that its bits depend on no other."""
        return sequence.scheduling.deterministic and not self.hello.row_invariant

    def match_tokens(self, sequence: Sequence) -> tuple[int, int]:
        """Number of tokens of a waiting sequence that need no computing here, if it is placed now.

        Those that are loaded for it, or sent from where it was, are among them. The second number says what that costs:
        so many tokens could be computed in the same time.
        """
        sequence.begin_with(self.weights.number)
        shared = self._match(sequence)
        coming = self._coming(sequence, len(shared))
        if coming:
            return (len(shared) + coming) * self.block_size, self.arrivals.cost(coming)
        fills = self._fills(sequence, len(shared))
        if fills:
            return (len(shared) + len(fills)) * self.block_size, 0
        spilled = len(self._spilled(sequence, len(shared)))
        return (len(shared) + spilled) * self.block_size, self.spilled_rows.cost(spilled)

    def place(self, sequence: Sequence, replica: int, limit: int, spare: int) -> bool:
        """Give a waiting sequence a row, the blocks of all its tokens, and its adapter. False if there is no room.

        `spare` blocks are kept for the growth of the sequences that run already. Where another row is computing more of
        its beginning, the row waits for that; where it lies beside the KV cache, until it is loaded; and where it lies
        on a worker that the sequence has left, until it has come.
        """
        if self.rows.full:
            return False
        if sequence.adapter is not None and not self.adapters.has_room(sequence.adapter):
            return False
        sequence.begin_with(self.weights.number)
        needed = -(-(len(sequence.tokens) + 1) // self.block_size)
        shared = self._match(sequence)
        cached = len(shared) * self.block_size
        coming = self._coming(sequence, len(shared))
        fills = [] if coming else self._fills(sequence, len(shared))
        spilled = [] if coming or fills else self._spilled(sequence, len(shared))
        shared += [fill.block for fill in fills]
        fresh = needed - len(shared)
        if fresh + self.pool.unowned(shared) + (spare if self.rows.running else 0) > self.pool.available:
            return False
        self.pool.share(shared)
        slots = self.spill.hold(spilled)
        sequence.blocks = shared + self.pool.allocate(fresh)
        if sequence.emitted == 0 and sequence.preemptions == 0 and sequence.elsewhere is None:
            sequence.queued_us = int((self._clock() - sequence.arrived) * 1e6)
        row = self.rows.take(sequence, replica, limit, cached, self.runs_alone(sequence))
        self.images.placed(sequence, cached)
        self.adapters.placed(sequence)
        self.joined.append(sequence)
        self.new_blocks += [(row, index, block) for index, block in enumerate(sequence.blocks)]
        if coming:
            self.arrivals.expect(row, len(shared), coming)
        elif fills:
            self.prefix_waits.wait(row, fills, len(shared) * self.block_size)
        elif slots:
            self.spilled_rows.load(row, len(shared), slots)
        else:
            self._begin_at(sequence, cached)
        if not coming:
            sequence.elsewhere = None
        # Those that report share few tokens of each step: a row that waited for one would be as slow.
        if self._computes_for_others(sequence) and not self.rows.report_end[row]:
            self.prefix_waits.announce(row, sequence.blocks, self._hashes(sequence), len(shared), self.block_size)
        return True

    def kv_moved(self, message: KvMoved) -> list[tuple[Sequence, Load, int, float]]:
        """Let rows run whose blocks are loaded. Returns their sequences, with the blocks and seconds of each load.

        What could not be loaded is computed. ValueError for a report that fits no order.
        """
        return [
            (self._run_from(load.row, (load.first + count) * self.block_size), load, count, seconds)
            for load, count, seconds in self.spilled_rows.moved(message)
        ]

    def end_arrival(self, arrival: Arrival) -> Sequence | None:
        """Let a row run whose blocks have come, or some of them. Returns its sequence, if it still waits."""
        waits = self.arrivals.has_owner(arrival)
        tokens = self.arrivals.end(arrival)
        if not waits:
            return None
        sequence = self._run_from(arrival.row, tokens)
        sequence.elsewhere = None
        return sequence

    def give_away(self, row: int) -> Sequence:
        """Take a sequence off a worker that leaves. Its blocks stay as they are: nothing more is computed here."""
        sequence = self.rows.sequence(row)
        tokens = int(self.rows.num_computed_tokens[row])
        known = 0 if sequence.elsewhere is None else sequence.elsewhere.tokens
        if self.hello.kv_form and tokens > known and not sequence.mixed and not sequence.images:
            blocks = sequence.blocks[: -(-tokens // self.block_size)]
            place = self.hello.index, self.hello.epoch, blocks
            sequence.elsewhere = KvElsewhere(*place, tokens, self.hello.kv_form, sequence.weights)
        return self.remove(row)

    def settle_waits(self) -> None:
        """Let rows run whose beginning the steps that were sent compute for others."""
        for row in self.prefix_waits.settle():
            self._begin_at(self.rows.sequence(row), int(self.rows.num_computed_tokens[row]))

    def take_orphans(self) -> list[Sequence]:
        """Take off the sequences that wait for blocks which nothing fills any more. They have computed nothing."""
        taken: list[Sequence] = []
        taken += [self.remove(row) for row in self.spilled_rows.late()]
        for row in self.arrivals.late():
            sequence = self.remove(row)
            sequence.elsewhere = None
            taken.append(sequence)
        while orphans := self.prefix_waits.orphans():
            taken += [self.remove(row) for row in orphans]
        return taken

    @property
    def joining(self) -> list[Sequence]:
        """The sequences that the next step introduces."""
        return [sequence for sequence in self.joined if not self.rows.awaited[sequence.row]]

    @property
    def must_hear(self) -> bool:
        """Whether the worker must get a step although nothing is computed: it encodes images, or moves blocks."""
        encodes = bool(self.images.takes) and any(sequence.images for sequence in self.joining)
        return encodes or self.spill.has_orders

    def remove(self, row: int) -> Sequence:
        """Take a sequence off the worker. Its full blocks stay in the prefix cache."""
        # A step in flight may compute its last token, and right guesses beyond its end.
        computed = int(self.rows.num_computed_tokens[row])
        self._register(row, min(computed, len(self.rows.sequence(row).tokens)))
        self.settle_waits()
        self.prefix_waits.forget(row)
        sequence = self.rows.give_back(row)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        self._forget_unsent(row, sequence)
        return sequence

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
        self.new_blocks.append((row, len(sequence.blocks), block))
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
            self._register(row, min(int(table.num_computed_tokens[row]), len(sequence.tokens)))
        return ahead

    def take_changes(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Rows to drop and new blocks since the last step, for the step that is sent now."""
        held = self.rows.awaited > 0
        changes = self.dropped, [entry for entry in self.new_blocks if not held[entry[0]]]
        self.dropped = []
        self.joined = [sequence for sequence in self.joined if held[sequence.row]]
        self.new_blocks = [entry for entry in self.new_blocks if held[entry[0]]]
        return changes

    def receive(self, result: StepResult) -> NewTokens:
        """Match a result with its step and learn from the time it took.

        Late rows and those of other owners are left out. ValueError if no step in flight has this result.
        """
        step, seconds = self.in_flight.take(result)
        self.batches.grant_grace()
        if step.tokens:
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

    def status(self) -> WorkerStatus:
        waits = [wait[0] for wait in (self.in_flight.waited(), self.batches.waited()) if wait is not None]
        spill = self.spill
        return WorkerStatus(
            device=self.hello.device,
            index=self.hello.index,
            epoch=self.hello.epoch,
            running=self.rows.running + self.batches.requests + self.beside.requests,
            blocks_total=self.pool.num_blocks,
            blocks_used=self.pool.used,
            blocks_cached=self.pool.cached,
            steps=self.in_flight.answered + self.batches.answered + self.beside.answered,
            seconds_since_step=min(waits, default=0.0),
            drafted=self.hello.drafted,
            accepted=self.hello.accepted,
            drafts=self.hello.drafts,
            accepted_at=self.hello.accepted_at,
            encoded=self.hello.encoded,
            image_hits=self.hello.image_hits,
            encode_ms=self.hello.encode_ms,
            backend=self.hello.backend,
            tasks=self.hello.tasks,
            placed_tokens=self.placed_tokens,
            saved_tokens=self.saved_tokens,
            spill_slots=spill.slots,
            spill_used=spill.used,
            spilled_blocks=spill.saved,
            loaded_tokens=spill.loaded * self.block_size,
        )

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

    def _match(self, sequence: Sequence) -> list[int]:
        """Cached blocks that hold the beginning of `sequence`."""
        if not self.prefix_cache or not self.images.shares_prefix(sequence):
            return []
        found = self.pool.match(self._hashes(sequence)[: sequence.reusable // self.block_size])
        return found[: self._shareable(sequence, len(found) * self.block_size) // self.block_size]

    def _fills(self, sequence: Sequence, first: int) -> list[Fill]:
        """Blocks from index `first` on that rows are filling with the beginning of `sequence`; none if it is short."""
        if not self._computes_for_others(sequence):
            return []
        found = self.prefix_waits.find(self._hashes(sequence)[first : sequence.reusable // self.block_size])
        return found if len(found) * self.block_size >= self.min_awaited_tokens else []

    def _coming(self, sequence: Sequence, first: int) -> int:
        """How many blocks from index `first` on are worth sending from the worker that the sequence has left.

        A sequence that runs alone is computed in whole pieces of its prompt, always the same ones.
        """
        return 0 if self.runs_alone(sequence) else self.arrivals.find(sequence, first)

    def _spilled(self, sequence: Sequence, first: int) -> list[bytes]:
        """Digests of blocks from index `first` on that are worth loading for the beginning of `sequence`."""
        if not self.spill.slots or not self._computes_for_others(sequence):
            return []
        return self.spilled_rows.find(self._hashes(sequence)[first : sequence.reusable // self.block_size])

    def _run_from(self, row: int, tokens: int) -> Sequence:
        """Let a row run whose first `tokens` tokens have come."""
        sequence = self.rows.sequence(row)
        self.rows.num_computed_tokens[row] = tokens
        self.rows.awaited[row] = 0
        self._register(row, tokens)
        self._begin_at(sequence, tokens)
        return sequence

    def _computes_for_others(self, sequence: Sequence) -> bool:
        """Whether others may wait for the blocks of a sequence, and it for theirs."""
        return self.prefix_cache and not sequence.images and not self.runs_alone(sequence)

    def _begin_at(self, sequence: Sequence, cached: int) -> None:
        """Note that the first `cached` tokens of a sequence need no computing."""
        if sequence.emitted == 0 and sequence.preemptions == 0 and sequence.elsewhere is None:
            sequence.cached_tokens = sequence.context.cached_prefix_length = cached
        sequence.tokens.set_window(cached, len(sequence.tokens), len(sequence.tokens))
        self.placed_tokens += len(sequence.tokens)
        self.saved_tokens += cached

    def _hashes(self, sequence: Sequence) -> list[bytes]:
        return sequence.prefix_hashes(self.block_size, self.runs_alone(sequence))

    def _shareable(self, sequence: Sequence, tokens: int) -> int:
        """Number of the first `tokens` that others may use.

        For a sequence that runs alone these are whole pieces of the prompt: later tokens are computed one by one.
        """
        if not self.runs_alone(sequence):
            return tokens
        return min(tokens, sequence.prompt_len) // self.fixed_tokens * self.fixed_tokens

    def _register(self, row: int, tokens: int) -> None:
        """Put the full blocks of the first `tokens` of a row into the prefix cache."""
        sequence = self.rows.sequence(row)
        if not self.prefix_cache or sequence.mixed or not self.images.shares_prefix(sequence):
            return
        full = self._shareable(sequence, tokens) // self.block_size
        hashes = self._hashes(sequence)
        pairs = zip(sequence.blocks[:full], hashes, strict=False)
        new = [index for index, (block, digest) in enumerate(pairs) if self.pool.register(block, digest)]
        if new and self.kv_log is not None and not self.runs_alone(sequence):
            # Those between may be registered under other blocks: readers take them once more.
            self.kv_log.stored(sequence, hashes, new[0], new[-1] + 1 - new[0])

    def _forget_unsent(self, row: int, sequence: Sequence) -> None:
        if sequence in self.joined:
            # The worker was never sent this row: there is nothing to drop.
            self.joined.remove(sequence)
        else:
            self.dropped.append(row)
        self.new_blocks = [entry for entry in self.new_blocks if entry[0] != row]
