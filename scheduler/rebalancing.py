"""Running sequences go to a worker that has far fewer of them, with the K and V that they have.

New requests fill a worker that has just joined, or has come back. Long streams would stay crowded where they are. So
while nothing waits, and one worker has run so many sequences more than another one for half a second that placement
would send it no more, one after the other moves, shortest first, where sending what it has takes less time than
computing it. Its blocks stay owned on the worker that it leaves until they are sent. What does not come is computed, as
in `shipping.py`, which has the messages. A sequence moves so once at most. Knows workers, rows and blocks. Does not
know messages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from interfaces import GENERATE, Stage
from scheduler import placement
from scheduler.limits import Limits
from scheduler.open_requests import OpenRequests
from scheduler.placement_cost import most_beside
from scheduler.rows import ALL_TOKENS
from scheduler.sequence import KvElsewhere, Sequence
from scheduler.workers import Worker

# Seconds between two looks, and seconds after which workers that are far apart are not about to be level by themselves.
LOOK_SECONDS = 0.1
LASTING_SECONDS = 0.5
# A sequence that may end after fewer tokens stays where it is.
LEAST_LEFT = 64


class _Held(NamedTuple):
    """Blocks of a worker that `sequence` has left, while they are sent."""

    source: Worker
    sequence: Sequence
    elsewhere: KvElsewhere


class Rebalancing:
    """The sequences that move, and what is held for them."""

    def __init__(self, requests: OpenRequests, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = requests
        self._limits = limits
        self._clock = clock
        self._held: list[_Held] = []
        self._looked = -math.inf
        # Since when workers are far apart; None while they are not.
        self._apart: float | None = None

    def advance(self, may_move: bool) -> None:
        """Give back the blocks that have been sent. If requests `may_move`, begin to move the next ones."""
        if self._held:
            self._give_back()
        if not may_move or len(self._requests.workers) < 2 or self._clock() - self._looked < LOOK_SECONDS:
            return
        self._looked = self._clock()
        waiting = self._requests.waiting
        pair = self._far_apart() if len(waiting) == waiting.background else None
        if pair is None:
            self._apart = None
            return
        self._apart = self._looked if self._apart is None else self._apart
        if self._looked - self._apart >= LASTING_SECONDS:
            self._move_one(*pair)

    def lose_worker(self, worker: Worker) -> None:
        """Forget what is held on a worker that is lost."""
        self._held = [each for each in self._held if each.source is not worker]

    def held(self, worker: Worker) -> list[int]:
        """The blocks that are held on a worker, each as often as it is."""
        return [block for each in self._held if each.source is worker for block in each.elsewhere.blocks]

    # Inside

    def _give_back(self) -> None:
        """Give back the blocks that nothing waits for any more."""
        workers = self._requests.workers.values()
        sending = {id(arrival.source) for worker in workers for arrival in worker.arrivals.open}
        over = [each for each in self._held if id(each.elsewhere) not in sending]
        for each in over:
            each.source.pool.release(each.elsewhere.blocks)
            if each.sequence.elsewhere is each.elsewhere:
                each.sequence.elsewhere = None
            self._held.remove(each)

    def _far_apart(self) -> tuple[Worker, Worker] | None:
        """The worker that runs most and the one that runs fewest; None if they are not far apart."""
        able = [
            worker
            for worker in placement.doing(GENERATE, self._requests.workers.values())
            if worker.weights.ready and not worker.leaving and worker.hello.kv_form
        ]
        if len(able) < 2:
            return None
        target = min(able, key=_running)
        alike = [worker for worker in able if worker.hello.kv_form == target.hello.kv_form]
        source = max(alike, key=_running)
        return (source, target) if _running(source) > most_beside(_running(target)) else None

    def _move_one(self, source: Worker, target: Worker) -> None:
        """Move a sequence, if none is under way and it pays."""
        busy = bool(target.arrivals.open) or any(each.source is source for each in self._held)
        if busy or target.rows.full:
            return
        for row in _movable(source):
            if self._move(source, target, row):
                return

    def _move(self, source: Worker, target: Worker, row: int) -> bool:
        """Move the sequence of a row, if it pays. Returns whether it has left."""
        sequence = source.rows.sequence(row)
        elsewhere = source.kv_of(row)
        if elsewhere is None or not self._fits(sequence, source, target, elsewhere):
            return False
        apart = f"worker {source.hello.index} runs {_running(source)}, and worker {target.hello.index} only"
        story = f"{apart} {_running(target)}: it moves, with the K and V of {elsewhere.tokens} tokens"
        source.pool.share(elsewhere.blocks)
        self._held.append(_Held(source, sequence, elsewhere))
        source.remove(row)
        sequence.elsewhere = elsewhere
        sequence.moved = True
        self._requests.record(sequence, story, Stage.QUEUED)
        self._requests.counters["rebalanced"] += 1
        if not placement.place_on(target, self._requests, self._limits, sequence):
            # The prefix cache has what it needs where it was.
            sequence.elsewhere = None
            self._requests.waiting.add(sequence)
        return True

    def _fits(self, sequence: Sequence, source: Worker, target: Worker, elsewhere: KvElsewhere) -> bool:
        """Whether the target has room for a sequence, and it pays to send it what it has."""
        if sequence.weights != target.weights.number or self._requests.quarantine.is_isolated(sequence):
            return False
        if not placement.takes(target, self._requests, sequence):
            return False
        blocks = len(elsewhere.blocks)
        if blocks + target.rows.running >= target.pool.available:
            return False
        return target.arrivals.pays(blocks, source.prefill_budget)


def _running(worker: Worker) -> int:
    return worker.rows.running - worker.rows.background


def _movable(worker: Worker) -> list[int]:
    """Rows in the midst of their answers that may move, shortest first."""
    table = worker.rows
    rows = table.occupied()
    rows = rows[(table.num_tokens[rows] - table.num_computed_tokens[rows] <= 1) & (table.awaited[rows] == 0)]
    rows = rows[(table.upto[rows] == ALL_TOKENS) & ~table.awaits_adapter[rows] & (table.fixed[rows] == 0)]
    rows = rows[~table.reports[rows] & (table.limit[rows] - table.num_tokens[rows] >= LEAST_LEFT)]
    rows = rows[np.argsort(table.num_tokens[rows], kind="stable")]
    return [row for row in rows.tolist() if _may_move(table.sequence(row))]


def _may_move(sequence: Sequence) -> bool:
    return not (sequence.moved or sequence.background or sequence.mixed or sequence.images or not sequence.emitted)
