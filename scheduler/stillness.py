"""Requests that no longer progress although they could: the last resort for those that wait.

A long wait is right in a long queue, while a worker restarts, and in a long prompt. A request may wait as long as
something is computed that it depends on. After `STUCK_SECONDS` without that, nothing will come, and its client gets an
error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping

from interfaces import ErrorCode, RequestError
from scheduler.sequence import Sequence
from scheduler.waiting_queue import WaitingQueue
from scheduler.workers import Worker

LOOK_SECONDS = 10.0
# Longer than any restart of a worker, which may load hundreds of gigabytes.
STUCK_SECONDS = 1800.0

_Progress = tuple[int, int]


class StuckDetector:
    """The progress of each open request, and since when it is that."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._seen: dict[int, tuple[_Progress, float]] = {}
        self._clock = clock

    def grant_grace(self) -> None:
        """Count all times from now, because nothing could be computed before: a pause, or a jump of the clock."""
        now = self._clock()
        self._seen = {order: (progress, now) for order, (progress, _) in self._seen.items()}

    def stuck(
        self, sequences: Iterable[Sequence], workers: Mapping[int, Worker]
    ) -> list[tuple[Sequence, RequestError]]:
        """Requests that have waited too long, each with the error for its client."""
        now = self._clock()
        before = self._seen
        self._seen = {}
        found = []
        for sequence in sequences:
            progress = _progress(sequence, workers)
            known, since = before.get(sequence.order, (progress, now))
            since = since if known == progress else now
            self._seen[sequence.order] = progress, since
            if now - since > STUCK_SECONDS:
                found.append((sequence, _error(sequence, workers, now - since)))
        return found


def misplaced(sequences: Collection[Sequence], queue: WaitingQueue, workers: Mapping[int, Worker]) -> list[Sequence]:
    """Open requests that neither wait nor run, as after an error in the middle of moving one."""
    waiting = {id(sequence) for sequence in queue}
    running = {id(sequence) for worker in workers.values() for sequence in worker.rows.sequences}
    return [one for one in sequences if id(one) not in (waiting if one.waiting else running)]


def _worker_of(sequence: Sequence, workers: Mapping[int, Worker]) -> Worker | None:
    if sequence.waiting:
        return None
    return next(worker for worker in workers.values() if worker.rows.has(sequence))


def _progress(sequence: Sequence, workers: Mapping[int, Worker]) -> _Progress:
    """A value that changes whenever something is computed that the sequence depends on.

    That is the sequence itself, or the steps of others while it waits for a row, for blocks, for its beginning, or for
    the end of all others.
    """
    worker = _worker_of(sequence, workers)
    if worker is None:
        return -1, sum(one.in_flight.answered for one in workers.values())
    table = worker.rows
    row = sequence.row
    if sequence.background or table.awaited[row] or table.num_tokens[row] > table.num_blocks[row] * worker.block_size:
        return -1, worker.in_flight.answered
    return int(table.num_computed_tokens[row]), 0


def _error(sequence: Sequence, workers: Mapping[int, Worker], seconds: float) -> RequestError:
    worker = _worker_of(sequence, workers)
    if worker is not None:
        where = f"it is on {worker.describe()}"
    else:
        where = "it waits, and the workers compute nothing" if workers else "it waits, and no model worker is here"
    return RequestError(
        ErrorCode.UNAVAILABLE, f"nothing has been computed for this request for {seconds:.0f} s: {where}"
    )
