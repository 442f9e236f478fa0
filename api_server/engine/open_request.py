"""What every request in the scheduler's hands has, whatever it is for: a handle, time limits, and losses in a row."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from dataclasses import replace

from interfaces import ErrorCode, GenerationStatus, RequestError, RequestID, SchedulingOptions, Segments, Submit
from shared import logs

log = logging.getLogger("tokenyard")

# Losses of one request that are further apart than this are unrelated.
SECONDS_OF_A_ROW = 60.0


def too_large(size: int, most: int) -> RequestError:
    """Say that a request of so many bytes cannot be sent, and what to do.

    A peer that receives more than it takes closes the connection, and loses what others have sent.
    """
    problem = f"the request takes {size} bytes, and {most} are the most that can be sent"
    return RequestError(ErrorCode.INVALID, f"{problem}: send fewer texts at a time, or fewer or smaller images")


class OpenRequest(ABC):
    """One request, from its first `Submit` to its end. `handle` changes when it is submitted again."""

    __slots__ = ("_losses", "_lost_at", "_progress_at_loss", "_scheduling", "_submitted", "again", "handle", "queued")

    def __init__(self, handle: int, scheduling: SchedulingOptions) -> None:
        self.handle = handle
        # True when the request was in the scheduler's queue before, or on its way there.
        self.again = False
        # Seconds that the request waited in the scheduler. None while it waits, or if it never ran.
        self.queued: float | None = None
        self._scheduling = scheduling
        self._submitted = time.monotonic()
        # Losses in a row, the time of the last one, and the request's progress at that time.
        self._losses = 0
        self._lost_at = 0.0
        self._progress_at_loss = 0

    def log_failure(self, reason: str) -> None:
        """Writes a line about the end of this request."""
        with logs.about(self.request_id, self._scheduling.trace_id):
            log.error("request %s failed: %s", self.request_id, reason)

    @property
    @abstractmethod
    def request_id(self) -> RequestID: ...

    @property
    @abstractmethod
    def message(self) -> Submit:
        """The Submit message, at first and again."""

    @property
    @abstractmethod
    def progress(self) -> int:
        """A number that grows with every part of the answer."""

    @abstractmethod
    def add(self, token: int, logprob: float | None) -> None:
        """Adds a token (-1: none)."""

    @abstractmethod
    def end(self, status: GenerationStatus) -> None:
        """Ends the request without an error of its own."""

    @abstractmethod
    def fail(self, error: RequestError) -> None:
        """Ends the request with its own error."""

    @abstractmethod
    def share(self, segments: Segments) -> None:
        """Puts large arrays of the context into shared memory, until `unshare`."""

    @abstractmethod
    def unshare(self, segments: Segments) -> None:
        """Makes the arrays this process's own again."""

    @property
    def scheduling(self) -> SchedulingOptions:
        """The scheduling options; the time that has passed counts against the limits."""
        scheduling = self._scheduling
        if scheduling.queue_seconds is None and scheduling.total_seconds is None:
            return scheduling
        passed = time.monotonic() - self._submitted
        return replace(
            scheduling,
            queue_seconds=None if scheduling.queue_seconds is None else max(0.0, scheduling.queue_seconds - passed),
            total_seconds=None if scheduling.total_seconds is None else max(0.0, scheduling.total_seconds - passed),
        )

    def lost_again(self) -> int:
        """Records that the scheduler lost the request; returns the losses in a row.

        Progress, or a while without a loss, ends the row.
        """
        now = time.monotonic()
        in_a_row = self.progress == self._progress_at_loss and now - self._lost_at < SECONDS_OF_A_ROW
        self._losses = self._losses + 1 if in_a_row else 1
        self._lost_at = now
        self._progress_at_loss = self.progress
        return self._losses
