"""Which requests have run out of time. Knows times; `core.py` and `oneshot.py` fail them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from interfaces import ErrorCode, RequestError, SchedulingOptions


class Timed(Protocol):
    """A request as its deadlines see it."""

    @property
    def order(self) -> int: ...

    @property
    def arrived(self) -> float: ...

    @property
    def scheduling(self) -> SchedulingOptions: ...

    @property
    def returning(self) -> bool:
        """Whether it has been on a worker."""
        ...


R = TypeVar("R", bound=Timed)


class RequestDeadlines(Generic[R]):
    """The open requests with a time limit. They are few and checked twice a second, so they are kept in no order."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._watched: dict[int, R] = {}
        self._clock = clock

    def watch(self, request: R) -> None:
        if request.scheduling.queue_seconds is not None or request.scheduling.total_seconds is not None:
            self._watched[request.order] = request

    def forget(self, request: R) -> None:
        self._watched.pop(request.order, None)

    def passed(self) -> list[tuple[R, RequestError]]:
        """Requests whose time is up, each with the error for its client."""
        now = self._clock()
        late = [(request, _problem(request, now - request.arrived)) for request in self._watched.values()]
        return [(request, RequestError(ErrorCode.TIMEOUT, problem)) for request, problem in late if problem]


def _problem(request: Timed, age: float) -> str:
    in_queue = request.scheduling.queue_seconds
    total = request.scheduling.total_seconds
    if total is not None and age >= total:
        return f"the request has not ended within its time limit of {total:g} s"
    if in_queue is not None and age >= in_queue and not request.returning:
        return f"the request could not be started within its time limit of {in_queue:g} s"
    return ""
