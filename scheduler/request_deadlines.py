"""Which requests have run out of time. Knows times and sequences; `core.py` fails them."""

from __future__ import annotations

import time
from collections.abc import Callable

from interfaces import ErrorCode, RequestError
from scheduler.sequence import Sequence


class RequestDeadlines:
    """The open requests with a time limit. They are few and checked twice a second, so they are kept in no order."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._watched: dict[int, Sequence] = {}
        self._clock = clock

    def watch(self, sequence: Sequence) -> None:
        if sequence.terms.queue_seconds is not None or sequence.terms.total_seconds is not None:
            self._watched[sequence.order] = sequence

    def forget(self, sequence: Sequence) -> None:
        self._watched.pop(sequence.order, None)

    def passed(self) -> list[tuple[Sequence, RequestError]]:
        """Requests whose time is up, each with the error for its client."""
        now = self._clock()
        late = [(sequence, _problem(sequence, now - sequence.arrived)) for sequence in self._watched.values()]
        return [(sequence, RequestError(ErrorCode.TIMEOUT, problem)) for sequence, problem in late if problem]


def _problem(sequence: Sequence, age: float) -> str:
    in_queue = sequence.terms.queue_seconds
    total = sequence.terms.total_seconds
    if total is not None and age >= total:
        return f"the request has not ended within its time limit of {total:g} s"
    if in_queue is not None and age >= in_queue and not sequence.returning:
        return f"the request could not be started within its time limit of {in_queue:g} s"
    return ""
