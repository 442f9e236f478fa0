"""Streams that a client may take up again after its connection broke, at any replica.

A client that sends `X-Resume-Stream: true` gets an id with every event: the tokens it has of each answer, the answer
that the last token belongs to, and the number of the event since that token. The client comes back with the same body,
the stream's `X-Request-Id` and the `Last-Event-ID`. The scheduler replays all tokens, the server renders them again and
leaves out the events that the client has. A resumable stream is rendered token by token, so that the events are equal.

With `X-Resume-Stream: end` a client takes a stream up for the last time: when it leaves, the answer ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace

from starlette.datastructures import Headers

from api_server.engine.submission import Submission
from api_server.errors import invalid
from interfaces import GenerationStatus, TextGenerationOutput

HEADER = "x-resume-stream"
_POSITION = re.compile(r"(\d{1,9}(?:-\d{1,9}){0,1023})(?::(\d{1,4}))?\.(\d{1,9})", re.ASCII)


@dataclass(frozen=True)
class Position:
    """A client's position in a stream: tokens of each answer, the answer of the last one, and events since then."""

    counts: tuple[int, ...]
    last: int
    event: int

    @classmethod
    def parse(cls, text: str) -> Position:
        """Parses a `Last-Event-ID`. Raises RequestFailed(INVALID)."""
        found = _POSITION.fullmatch(text.strip())
        if found is None:
            raise invalid(
                f"last-event-id must be an id that this server gave to an event, got {text[:50]!r}", "last-event-id"
            )
        return cls(tuple(map(int, found[1].split("-"))), int(found[2] or 0), int(found[3]))

    def __str__(self) -> str:
        last = f":{self.last}" if len(self.counts) > 1 else ""
        return f"{'-'.join(map(str, self.counts))}{last}.{self.event}"


class Resume:
    """One resumable answer to one HTTP request: splits updates into tokens, orders and numbers them."""

    def __init__(self, name: str, after: Position | None = None, ends: bool = False) -> None:
        self.name = name
        # True when the answer ends with this connection.
        self.ends = ends
        self._after = after
        self._taken: list[int] = []
        self._shown: list[int] = []
        self._last = 0
        self._done: set[int] = set()
        self._waiting: list[tuple[Submission, int, TextGenerationOutput]] = []
        self._marked: Position | None = None

    @classmethod
    def wanted(cls, headers: Headers, request_id: str) -> Resume | None:
        """The `Resume` that the headers ask for, if they do. Raises RequestFailed(INVALID)."""
        given = headers.get(HEADER, "").lower()
        if given not in ("true", "end"):
            return None
        last = headers.get("last-event-id")
        return cls(request_id, Position.parse(last) if last else None, given == "end")

    def open(self, answers: int) -> None:
        """Starts with `answers` answers. Raises RequestFailed(INVALID) when the client has read another number."""
        self._taken = [0] * answers
        self._shown = [0] * answers
        if self._after is not None and len(self._after.counts) != answers:
            raise invalid(
                f"last-event-id names {len(self._after.counts)} answers, this request has {answers}", "last-event-id"
            )

    def put(self, submission: Submission, index: int, output: TextGenerationOutput) -> None:
        """Adds an update of answer `index`."""
        self._waiting += [(submission, index, part) for part in _tokens(output)]

    def drop(self, submission: Submission) -> None:
        """Drops the unread updates of a submission."""
        self._waiting = [entry for entry in self._waiting if entry[0] is not submission]

    def take(self) -> tuple[Submission, TextGenerationOutput] | None:
        """The next token, or None when more updates are needed.

        Answers that are ahead of what the client has read wait until all are there. The last token that the client has
        read is the last one again, so that an event's id keeps its meaning.
        """
        behind = {index for index in range(len(self._taken)) if self._is_behind(index)}
        for i, (submission, index, part) in enumerate(self._waiting):
            if not behind or (index in behind and not self._must_be_last(index, behind)):
                del self._waiting[i]
                self._taken[index] += len(part.tokens)
                if part.final_status.is_done:
                    self._done.add(index)
                return submission, part
        return None

    def shown(self, index: int, tokens: int) -> None:
        """Records that `tokens` more tokens of an answer are rendered: the next events belong to these."""
        if tokens:
            self._shown[index] += tokens
            self._last = index

    def mark(self, events: bytes) -> bytes:
        """The events with their ids, without those that the client has already."""
        return b"".join(self._mark(event) for event in events.split(b"\n\n") if event)

    def _mark(self, event: bytes) -> bytes:
        counts = tuple(self._shown)
        same = self._marked is not None and self._marked.counts == counts
        position = self._marked = Position(counts, self._last, self._marked.event + 1 if same and self._marked else 0)
        if self._after is not None and self._has_read(self._after, position):
            return b""
        return f"id: {position}\n".encode() + event + b"\n\n"

    @staticmethod
    def _has_read(after: Position, position: Position) -> bool:
        if after.counts == position.counts:
            return position.event <= after.event
        return all(mine <= read for mine, read in zip(position.counts, after.counts, strict=True))

    def _must_be_last(self, index: int, behind: set[int]) -> bool:
        if self._after is None or index != self._after.last or behind == {index}:
            return False
        return self._taken[index] == self._after.counts[index] - 1

    def _is_behind(self, index: int) -> bool:
        return self._after is not None and index not in self._done and self._taken[index] < self._after.counts[index]


# The `Resume` of the current HTTP request, or None if it did not ask for one.
current: ContextVar[Resume | None] = ContextVar("resume", default=None)


def _tokens(output: TextGenerationOutput) -> Iterator[TextGenerationOutput]:
    """Splits an output into one per token, with its log-probability; the end comes with the last one."""
    last = len(output.tokens) - 1
    if last <= 0:
        yield output
        return
    for i, token in enumerate(output.tokens):
        status = output.final_status if i == last else GenerationStatus.ACTIVE
        logprobs = output.log_probabilities and output.log_probabilities[i : i + 1]
        yield replace(output, tokens=[token], final_status=status, log_probabilities=logprobs)
