"""Which requests have run out of time. Knows times and sequences; who fails them is `core.py`."""

from __future__ import annotations

from interfaces import ErrorCode, RequestError
from scheduler.sequence import Sequence


class RequestDeadlines:
    """The open requests that have a limit. They are few and looked through twice a second: no order is kept."""

    def __init__(self) -> None:
        self._watched: dict[int, Sequence] = {}

    def watch(self, sequence: Sequence) -> None:
        if sequence.terms.queue_seconds is not None or sequence.terms.total_seconds is not None:
            self._watched[sequence.order] = sequence

    def forget(self, sequence: Sequence) -> None:
        self._watched.pop(sequence.order, None)

    def passed(self, now: float) -> list[tuple[Sequence, RequestError]]:
        """Those whose time is up, with what to tell their clients."""
        late = [(sequence, _problem(sequence, now - sequence.arrived)) for sequence in self._watched.values()]
        return [(sequence, RequestError(ErrorCode.TIMEOUT, problem)) for sequence, problem in late if problem]


def _problem(sequence: Sequence, age: float) -> str:
    in_queue, total = sequence.terms.queue_seconds, sequence.terms.total_seconds
    if total is not None and age >= total:
        return f"the request has not ended within its time limit of {total:g} s"
    if in_queue is not None and age >= in_queue and not sequence.returning:
        return f"the request could not be started within its time limit of {in_queue:g} s"
    return ""
