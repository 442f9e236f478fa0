"""Requests in the scheduler's hands, and how whoever waits for them gets their news.

Knows contexts, tokens and reports as they arrive. Knows no socket.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from interfaces import (
    GenerationStatus,
    LogProbabilities,
    RequestError,
    SchedulerResult,
    SchedulerStatus,
    Submit,
    Terms,
    TextContext,
    TextGenerationOutput,
)

# Looking up a member in an enum costs more than comparing with it.
_UNFINISHED = GenerationStatus.ACTIVE
_CANCELLED = GenerationStatus.CANCELLED
_ACTIVE, _COMPLETE = SchedulerStatus.ACTIVE, SchedulerStatus.COMPLETE

SECONDS_OF_A_ROW = 60.0
"""Between two losses of one request: what is further apart has nothing to do with it."""

News = SchedulerResult[TextGenerationOutput]


class Inbox:
    """Where one waiting coroutine finds news of its submissions; news that nobody has fetched pile up and coalesce.

    After a submission's first token, `at_a_time` more of them are news; its end is at once.
    """

    def __init__(self) -> None:
        self.at_a_time = 1
        self._ready: deque[Submission] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    def put(self, submission: Submission) -> None:
        self._ready.append(submission)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> tuple[Submission, News]:
        """The oldest unread news: all tokens of one submission since its last news."""
        while (found := self.taken()) is None:
            await self.arrival()
        return found

    def taken(self) -> tuple[Submission, News] | None:
        """The same if there are any."""
        if not self._ready:
            return None
        submission = self._ready.popleft()
        return submission, submission.take()

    def discard(self, submission: Submission) -> None:
        """Its news are not wanted any more."""
        if submission in self._ready:
            self._ready.remove(submission)

    def arrival(self) -> asyncio.Future[None]:
        """Done when the next news come; one coroutine waits at a time."""
        self._waiter = self._loop.create_future()
        return self._waiter


class Submission:
    """One request in the scheduler's hands, from `EngineClient.submit` to its last result or `cancel`."""

    __slots__ = (
        "_announced",
        "_context",
        "_error",
        "_gathered",
        "_losses",
        "_lost_at",
        "_lost_length",
        "_reports",
        "_submitted",
        "_terms",
        "_unread",
        "_wants_logprobs",
        "again",
        "handle",
        "hidden",
        "inbox",
        "queued",
        "shared",
    )

    def __init__(self, handle: int, context: TextContext, inbox: Inbox, terms: Terms) -> None:
        self.handle = handle
        self._terms = terms
        self._submitted = time.monotonic()
        self._context = context
        self._gathered: list[int] = []
        """Tokens that the context is still to be given: all at once, which costs as much as one."""
        self.inbox = inbox
        self.queued: float | None = None
        """Seconds that it waited in the scheduler; None while it waits, or if it never ran."""
        self.hidden: dict[int, NDArray[np.float32]] = {}
        """Hidden states that have arrived, by the index of their token; a restarted scheduler tells them again."""
        self._wants_logprobs = context.log_probabilities > 0
        self._reports: dict[int, LogProbabilities] = {}
        self._announced = False
        self._unread: int | None = None
        """Tokens that have arrived since some were taken; None before the first."""
        self._error: RequestError | None = None
        self.again = False
        """Whether it stood in the scheduler's line before, or was on its way there."""
        self._losses, self._lost_at, self._lost_length = 0, 0.0, 0
        """How often in a row the scheduler has lost it; when, and how long it was then."""

    @property
    def context(self) -> TextContext:
        """Has every token received, read or not: a restarted scheduler is told all of it."""
        if self._gathered:
            self._context.receive_tokens(self._gathered)
            self._gathered = []
        return self._context

    @property
    def message(self) -> Submit:
        """What the scheduler is told, at first and again: the time that has passed counts."""
        terms = self._terms
        if terms.queue_seconds is not None or terms.total_seconds is not None:
            passed = time.monotonic() - self._submitted
            terms = replace(
                terms,
                queue_seconds=None if terms.queue_seconds is None else max(0.0, terms.queue_seconds - passed),
                total_seconds=None if terms.total_seconds is None else max(0.0, terms.total_seconds - passed),
            )
        return Submit(self.handle, self.context, terms, self.again)

    def lost_again(self) -> int:
        """The scheduler has lost it: how often in a row, which a token or a while without a loss ends."""
        now, length = time.monotonic(), len(self.context.tokens)
        in_a_row = length == self._lost_length and now - self._lost_at < SECONDS_OF_A_ROW
        self._losses = self._losses + 1 if in_a_row else 1
        self._lost_at, self._lost_length = now, length
        return self._losses

    def add(self, token: int, logprob: float | None) -> None:
        """A token has arrived (-1: none, other news)."""
        if token >= 0:
            if self._wants_logprobs or self._reports:
                self._add_reported(token, logprob)
            else:
                self._gathered.append(token)
            if self._unread is not None:
                self._unread += 1
                if self._unread < self.inbox.at_a_time:
                    return
        self.announce()

    def _add_reported(self, token: int, logprob: float | None) -> None:
        report = self._reports.pop(len(self.context.tokens), None)
        if report is None and logprob is not None and self._wants_logprobs:
            report = LogProbabilities([logprob], [{}])
        self.context.receive_token(token, report)

    def report(self, position: int, report: LogProbabilities) -> None:
        """Log-probabilities of a token of the prompt, or of a generated one, which follows."""
        if position < self.context.prompt_length:
            self.context.receive_prompt_report(position, report)
        else:
            self._reports[position] = report

    def announce(self) -> None:
        """Wakes the reader, unless it has news to read already."""
        if not self._announced:
            self._announced = True
            self.inbox.put(self)

    def end(self, status: GenerationStatus) -> None:
        self.context.status = status
        self.announce()

    def fail(self, error: RequestError) -> None:
        """Ends the request with its own error."""
        self._error = error
        self.end(_CANCELLED)

    def take(self) -> News:
        """What has arrived since the last call."""
        self._announced = False
        output = self.context.to_generation_output()
        if output.tokens:
            self._unread = 0
        if output.final_status is _UNFINISHED:
            return SchedulerResult(_ACTIVE, output)
        if output.final_status is _CANCELLED:
            return SchedulerResult(SchedulerStatus.CANCELLED, output, self._error)
        return SchedulerResult(_COMPLETE, output)
