"""Requests for which nothing comes although something could: the last net under those that wait.

Long waits are right in a long line, while a worker is restarted, and in a long prompt. As long as something is computed
that a request depends on, it may wait; when nothing has been for `STUCK_SECONDS`, nothing will come, and it is better
that its client is told so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from interfaces import ErrorCode, RequestError
from scheduler.sequence import Sequence
from scheduler.waiting_queue import WaitingQueue
from scheduler.workers import Worker

LOOK_SECONDS = 10.0
STUCK_SECONDS = 1800.0
"""More than the longest restart of a worker, which may load hundreds of gigabytes."""

_Progress = tuple[int, int]


class StuckDetector:
    """Remembers how far each open request was, and since when."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[_Progress, float]] = {}

    def grant_grace(self, now: float) -> None:
        """Nothing could be computed until now: a pause, or a standstill of everything."""
        self._seen = {order: (progress, now) for order, (progress, _) in self._seen.items()}

    def stuck(
        self, sequences: Iterable[Sequence], workers: Mapping[int, Worker], now: float
    ) -> list[tuple[Sequence, RequestError]]:
        """Those that have waited too long, with what to tell their clients."""
        before, self._seen = self._seen, {}
        found = []
        for sequence in sequences:
            progress = _progress(sequence, workers)
            known, since = before.get(sequence.order, (progress, now))
            since = since if known == progress else now
            self._seen[sequence.order] = progress, since
            if now - since > STUCK_SECONDS:
                found.append((sequence, _error(sequence, workers, now - since)))
        return found


def misplaced(sequences: Collection[Sequence], line: WaitingQueue, workers: Mapping[int, Worker]) -> list[Sequence]:
    """Open requests that are neither in line nor on a worker: what went wrong with them was logged at that time."""
    waiting = {id(sequence) for sequence in line}
    running = {id(sequence) for worker in workers.values() for sequence in worker.rows.sequences}
    return [one for one in sequences if id(one) not in (waiting if one.waiting else running)]


def _worker_of(sequence: Sequence, workers: Mapping[int, Worker]) -> Worker | None:
    if sequence.waiting:
        return None
    return next(worker for worker in workers.values() if worker.rows.sequences[sequence.row] is sequence)


def _progress(sequence: Sequence, workers: Mapping[int, Worker]) -> _Progress:
    """Changes whenever something is computed that it waits for: others before it in line, or for whose blocks it waits,
    or itself.
    """
    worker = _worker_of(sequence, workers)
    if worker is None:
        return -1, sum(one.answered for one in workers.values())
    table, row = worker.rows, sequence.row
    if table.num_tokens[row] > table.num_blocks[row] * worker.block_size:
        return -1, worker.answered
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
