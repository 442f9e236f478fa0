"""Decisions about requests and events of workers: a bounded log in memory, for `tokenyard why`.

Knows request ids, sentences, and the stage of a request that a decision begins, for spans of traces. Costs nothing per
token: only what changes a request's fate is recorded.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from interfaces import Decision, Stage
from shared.logs import utc

MAX_REQUESTS = 4096
# For each request. The first and the latest are kept; those between them are counted.
MAX_ENTRIES = 64
MAX_EVENTS = 50


class _Entry(NamedTuple):
    """One decision. The time is Unix time; it is formatted when the log is read, which is seldom."""

    seconds: float
    text: str
    stage: int = Stage.NOTE
    sequence: int = -1
    worker: int = -1
    span_id: str = ""


class RequestLog:
    """Entries by request, and events. The oldest request is forgotten first."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, _Entries] = OrderedDict()
        self._events: deque[_Entry] = deque(maxlen=MAX_EVENTS)

    def record(
        self,
        request_id: str,
        text: str,
        stage: int = Stage.NOTE,
        sequence: int = -1,
        worker: int = -1,
        span_id: str = "",
    ) -> None:
        """Add an entry to a request; `stage`, `sequence`, `worker` and `span_id` as in `Decision`."""
        entries = self._requests.get(request_id)
        if entries is None:
            entries = self._requests[request_id] = _Entries()
            if len(self._requests) > MAX_REQUESTS:
                self._requests.popitem(last=False)
        entries.add(_Entry(time.time(), text, stage, sequence, worker, span_id))

    def record_event(self, text: str) -> None:
        """Add an event: a worker or replica came or went."""
        self._events.append(_Entry(time.time(), text))

    def of(self, request_id: str) -> list[str]:
        """All lines about requests whose id begins with `request_id`, oldest first."""
        return [
            f"{name}: {line}"
            for name, entries in self._requests.items()
            if name.startswith(request_id)
            for line in entries.lines()
        ]

    def decisions(self, request_ids: Sequence[str]) -> list[Decision]:
        """The decisions about requests with exactly these ids, those of each oldest first."""
        found = ((number, self._requests.get(request_id)) for number, request_id in enumerate(request_ids))
        return [
            Decision(number, entry.sequence, entry.seconds, entry.stage, entry.worker, entry.text, entry.span_id)
            for number, entries in found
            if entries is not None
            for entry in entries
        ]

    @property
    def events(self) -> list[str]:
        return [_line(entry) for entry in self._events]


class _Entries:
    __slots__ = ("_first", "_last", "_left_out")

    def __init__(self) -> None:
        self._first: list[_Entry] = []
        self._last: deque[_Entry] = deque(maxlen=MAX_ENTRIES // 2)
        self._left_out = 0

    def add(self, entry: _Entry) -> None:
        if len(self._first) < MAX_ENTRIES // 2:
            self._first.append(entry)
            return
        self._left_out += len(self._last) == self._last.maxlen
        self._last.append(entry)

    def __iter__(self) -> Iterator[_Entry]:
        yield from self._first
        yield from self._last

    def lines(self) -> list[str]:
        between = [f"... {self._left_out} more"] if self._left_out else []
        return [*map(_line, self._first), *between, *map(_line, self._last)]


def _line(entry: _Entry) -> str:
    return f"{utc(entry.seconds)} {entry.text}"
