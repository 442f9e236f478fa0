"""Running sequences go to a worker that has far fewer of them, with the K and V that they have.

New requests fill a worker that has just joined, or has come back. Long streams would stay crowded where they are. So
while nothing waits that finds no place, and one worker has run so many sequences more than another one for half a
second that placement would send it no more, one after the other moves, shortest first, where sending what it has and
the other one lacks takes less time than computing it. Workers are compared with those that can use their blocks: of one
form, and with the same weights. A sequence leaves only for a worker that has room for it, has read its adapter and lets
it become as long as before. Its blocks stay owned on the worker that it leaves until they are sent. What does not come
is computed, as in `shipping.py`, which has the messages. A sequence moves so once at most. Knows workers, rows and
blocks. Does not know messages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from interfaces import GENERATE
from scheduler import background, placement
from scheduler.arrivals import LEAST_BLOCKS
from scheduler.limits import Limits
from scheduler.open_requests import OpenRequests
from scheduler.placement_cost import most_beside
from scheduler.row_beginnings import Beginning
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


# What workers have in common that can use each other's blocks: their form, and the number of the weights.
_Kind = tuple[str, int]


class Rebalancing:
    """The sequences that move, and what is held for them."""

    def __init__(self, requests: OpenRequests, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = requests
        self._limits = limits
        self._clock = clock
        self._held: list[_Held] = []
        self._looked = -math.inf
        # Since when workers of each kind are far apart.
        self._apart: dict[_Kind, float] = {}

    def advance(self, may_move: bool) -> None:
        """If requests `may_move`, begin to move the next ones. What waits now has found no place."""
        if not may_move or len(self._requests.workers) < 2 or self._clock() - self._looked < LOOK_SECONDS:
            return
        self._looked = self._clock()
        waiting = self._requests.waiting
        kinds = self._kinds() if len(waiting) == waiting.background else {}
        pairs = {kind: found for kind, workers in kinds.items() if (found := _far_apart(workers))}
        self._apart = {kind: self._apart.get(kind, self._looked) for kind in pairs}
        for kind, since in self._apart.items():
            if self._looked - since >= LASTING_SECONDS:
                self._move_one(pairs[kind])

    def give_back(self) -> None:
        """Give back the blocks that nothing waits for any more: they have been sent."""
        if not self._held:
            return
        workers = self._requests.workers.values()
        sending = {id(arrival.source) for worker in workers for arrival in worker.arrivals.open}
        over = [each for each in self._held if id(each.elsewhere) not in sending]
        for each in over:
            each.source.pool.release(each.elsewhere.blocks)
            if each.sequence.elsewhere is each.elsewhere:
                each.sequence.elsewhere = None
            self._held.remove(each)

    def lose_worker(self, worker: Worker) -> None:
        """Forget what is held on a worker that is lost."""
        self._held = [each for each in self._held if each.source is not worker]

    def held(self, worker: Worker) -> list[int]:
        """The blocks that are held on a worker, each as often as it is."""
        return [block for each in self._held if each.source is worker for block in each.elsewhere.blocks]

    # Inside

    def _kinds(self) -> dict[_Kind, list[Worker]]:
        """The workers that can take part, by kind. One whose rows have a state beside their blocks cannot."""
        kinds: dict[_Kind, list[Worker]] = {}
        for worker in placement.doing(GENERATE, self._requests.workers.values()):
            hello = worker.hello
            if hello.kv_form and hello.reuses_prefixes and worker.weights.ready and not worker.leaving:
                kinds.setdefault((hello.kv_form, worker.weights.number), []).append(worker)
        return kinds

    def _move_one(self, pairs: list[tuple[Worker, Worker]]) -> None:
        """Move a sequence between the first two workers of which none is busy with another one, and where it pays."""
        sending = {each.source for each in self._held}
        movable: dict[Worker, list[int]] = {}
        for source, target in pairs:
            if source in sending or target.arrivals.open or not _pays(source, target, LEAST_BLOCKS):
                continue
            if source not in movable:
                movable[source] = _movable(source)
            if any(self._move(source, target, row) for row in movable[source]):
                return

    def _move(self, source: Worker, target: Worker, row: int) -> bool:
        """Move the sequence of a row, if it pays. Returns whether it has left."""
        sequence = source.rows.sequence(row)
        elsewhere = source.kv_of(row)
        if elsewhere is None or not self._may_run(sequence, target, int(source.rows.limit[row])):
            return False
        sequence.elsewhere = elsewhere
        if not self._fits(sequence, source, target):
            sequence.elsewhere = None
            return False
        apart = f"worker {source.hello.index} runs {_running(source)}, and worker {target.hello.index} only"
        story = f"{apart} {_running(target)}: it moves, with the K and V of {elsewhere.tokens} tokens"
        source.pool.share(elsewhere.blocks)
        self._held.append(_Held(source, sequence, elsewhere))
        source.remove(row)
        if placement.place_on(target, self._requests, self._limits, sequence, story):
            sequence.moved = True
            self._requests.counters["rebalanced"] += 1
        else:
            # The prefix cache has what it needs where it was.
            sequence.elsewhere = None
            self._requests.waiting.add(sequence)
        return True

    def _may_run(self, sequence: Sequence, target: Worker, limit: int) -> bool:
        """Whether the target can run a sequence to the end that it has now, `limit`, and has read its adapter."""
        there = placement.limit_of(sequence, self._requests, self._limits)
        if there < limit or there - len(sequence.tokens) < LEAST_LEFT:
            return False
        if sequence.weights != target.weights.number or self._requests.quarantine.is_isolated(sequence):
            return False
        if sequence.adapter is not None and not target.adapters.has_read(sequence.adapter):
            return False
        return placement.could_take(target, self._requests, sequence)

    def _fits(self, sequence: Sequence, source: Worker, target: Worker) -> bool:
        """Whether the target has room for a sequence, and it pays to send it what it lacks there.

        Rows of the lowest priority make room, as they do for requests that wait.
        """
        found = target.room_for(sequence, spare=target.rows.running)
        if found is None and _has_room_without_background(target, sequence):
            found = self._make_room(sequence, target)
        if found is None:
            return False
        elsewhere = sequence.elsewhere
        tokens = 0 if elsewhere is None else min(elsewhere.tokens, sequence.reusable)
        has = len(found.owned) + found.coming
        if not has or -(-tokens // target.block_size) - has >= LEAST_BLOCKS:
            return False
        return not found.coming or _pays(source, target, found.coming)

    def _make_room(self, sequence: Sequence, target: Worker) -> Beginning | None:
        """Take rows of the lowest priority off the target until a sequence has room there."""
        while yielding := background.take_one([target]):
            self._requests.preempt(yielding, f"request {sequence.context.request_id} wanted its place")
            found = target.room_for(sequence, spare=target.rows.running)
            if found is not None:
                return found
        return None


def _running(worker: Worker) -> int:
    return worker.rows.running - worker.rows.background


def _pays(source: Worker, target: Worker, blocks: int) -> bool:
    return target.arrivals.pays(blocks, source.prefill_budget)


def _far_apart(workers: list[Worker]) -> list[tuple[Worker, Worker]]:
    """Pairs of a worker that runs far more and one that runs far fewer and has a row for another one.

    First those of the one that runs fewest, with the one that runs most before others.
    """
    targets = sorted((each for each in workers if each.rows.free or each.rows.background), key=_running)
    sources = sorted(workers, key=_running, reverse=True)
    return [(one, other) for other in targets for one in sources if _running(one) > most_beside(_running(other))]


def _has_room_without_background(target: Worker, sequence: Sequence) -> bool:
    """Whether a target might have room for a sequence if its rows of the lowest priority made room."""
    rows = (each for each in target.rows.sequences if each is not None and each.background)
    free = target.pool.available + sum(len(each.blocks) for each in rows)
    return -(-(len(sequence.tokens) + 1) // target.block_size) + _running(target) <= free


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
