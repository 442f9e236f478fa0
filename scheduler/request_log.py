"""Decisions about requests and events of workers: a bounded log in memory, for `tokenyard why`.

Knows request ids and sentences. Costs nothing per token: only what changes a request's fate is recorded.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque

from shared.logs import utc

MAX_REQUESTS = 4096
# For each request. The first and the latest are kept; those between them are counted.
MAX_ENTRIES = 64
MAX_EVENTS = 50

# Unix time and a sentence. The time is formatted when the log is read, which is seldom.
_Entry = tuple[float, str]


class RequestLog:
    """Entries by request, and events. The oldest request is forgotten first."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, _Entries] = OrderedDict()
        self._events: deque[_Entry] = deque(maxlen=MAX_EVENTS)

    def record(self, request_id: str, text: str) -> None:
        """Add an entry to a request."""
        entries = self._requests.get(request_id)
        if entries is None:
            entries = self._requests[request_id] = _Entries()
            if len(self._requests) > MAX_REQUESTS:
                self._requests.popitem(last=False)
        entries.add((time.time(), text))

    def record_event(self, text: str) -> None:
        """Add an event: a worker or replica came or went."""
        self._events.append((time.time(), text))

    def of(self, request_id: str) -> list[str]:
        """All lines about requests whose id begins with `request_id`, oldest first."""
        return [
            f"{name}: {line}"
            for name, entries in self._requests.items()
            if name.startswith(request_id)
            for line in entries.lines()
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

    def lines(self) -> list[str]:
        between = [f"... {self._left_out} more"] if self._left_out else []
        return [*map(_line, self._first), *between, *map(_line, self._last)]


def _line(entry: _Entry) -> str:
    seconds, text = entry
    return f"{utc(seconds)} {text}"
