"""Requests in the scheduler's hands, and their updates for the coroutines that wait.

Knows contexts, tokens and reports as they arrive. Knows no socket.
"""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np
from numpy.typing import NDArray

from api_server.engine.open_request import OpenRequest
from interfaces import (
    FIRST_VERSION,
    GenerationStatus,
    LogProbabilities,
    RequestError,
    RequestID,
    SchedulerResult,
    SchedulerStatus,
    SchedulingOptions,
    Segments,
    Submit,
    TextContext,
    TextGenerationOutput,
)

# Looking up a member in an enum costs more than comparing with it.
_UNFINISHED = GenerationStatus.ACTIVE
_CANCELLED = GenerationStatus.CANCELLED
_ACTIVE = SchedulerStatus.ACTIVE
_COMPLETE = SchedulerStatus.COMPLETE

Update = SchedulerResult[TextGenerationOutput]


class Inbox:
    """Updates for one coroutine. Unread updates of a submission are merged.

    After a submission's first token an update is announced every `at_a_time` tokens, and at once at the end.
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

    async def next(self) -> tuple[Submission, Update]:
        """Waits for the oldest unread update: all tokens of one submission since its last update."""
        while (found := self.taken()) is None:
            await self.arrival()
        return found

    def taken(self) -> tuple[Submission, Update] | None:
        """The oldest unread update, or None. Does not wait."""
        if not self._ready:
            return None
        submission = self._ready.popleft()
        return submission, submission.take()

    def discard(self, submission: Submission) -> None:
        """Drops the unread updates of a submission."""
        if submission in self._ready:
            self._ready.remove(submission)

    def arrival(self) -> asyncio.Future[None]:
        """A future that is done when the next update comes; one coroutine waits at a time."""
        self._waiter = self._loop.create_future()
        return self._waiter


class Submission(OpenRequest):
    """One request in the scheduler's hands, from `EngineClient.submit` to its last result or `cancel`."""

    __slots__ = (
        "_announced",
        "_context",
        "_error",
        "_gathered",
        "_reports",
        "_unread",
        "_wants_logprobs",
        "guesses",
        "hidden",
        "inbox",
        "versions",
    )

    def __init__(self, handle: int, context: TextContext, inbox: Inbox, scheduling: SchedulingOptions) -> None:
        super().__init__(handle, scheduling)
        self._context = context
        # Tokens that are not in the context yet. Adding all at once costs as much as adding one.
        self._gathered: list[int] = []
        self.inbox = inbox
        # Hidden states that have arrived, by the index of their token; a restarted scheduler sends them again.
        self.hidden: dict[int, NDArray[np.float32]] = {}
        # Guesses at the answer that were computed, and those that were right.
        self.guesses = (0, 0)
        # Versions of the weights that made the answer, each with the number of generated tokens before it.
        self.versions: list[tuple[int, str]] = []
        self._wants_logprobs = context.log_probabilities > 0
        self._reports: dict[int, LogProbabilities] = {}
        self._announced = False
        # Tokens that have arrived since the last read; None before the first.
        self._unread: int | None = None
        self._error: RequestError | None = None

    @property
    def context(self) -> TextContext:
        """The context with every token received, read or not; a restarted scheduler gets all of it."""
        if self._gathered:
            self._context.receive_tokens(self._gathered)
            self._gathered = []
        return self._context

    @property
    def request_id(self) -> RequestID:
        return self._context.request_id

    @property
    def message(self) -> Submit:
        return Submit(self.handle, self.context, self.scheduling, self.again)

    @property
    def progress(self) -> int:
        return len(self.context.tokens)

    def share(self, segments: Segments) -> None:
        self.context.share_arrays(segments)

    def unshare(self, segments: Segments) -> None:
        # With all its tokens: from now on another owner may hold the context.
        self.context.unshare_arrays(segments)

    def add(self, token: int, logprob: float | None) -> None:
        """Adds a token (-1: none, another update)."""
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

    def goes_on_with(self, version: str, first: int) -> None:
        """Records which version of the weights makes the tokens from the generated token `first` on."""
        while self.versions and self.versions[-1][0] >= first:
            self.versions.pop()
        if first and not self.versions:
            self.versions.append((0, FIRST_VERSION))
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((first, version))

    def _add_reported(self, token: int, logprob: float | None) -> None:
        report = self._reports.pop(len(self.context.tokens), None)
        if report is None and logprob is not None and self._wants_logprobs:
            report = LogProbabilities([logprob], [{}])
        self.context.receive_token(token, report)

    def report(self, position: int, report: LogProbabilities) -> None:
        """Adds log-probabilities of a prompt token, or of a generated token that follows."""
        if position < self.context.prompt_length:
            self.context.receive_prompt_report(position, report)
        else:
            self._reports[position] = report

    def announce(self) -> None:
        """Wakes the reader, unless it has an unread update already."""
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

    def take(self) -> Update:
        """The update since the last call."""
        self._announced = False
        output = self.context.to_generation_output()
        if output.tokens:
            self._unread = 0
        if output.final_status is _UNFINISHED:
            return SchedulerResult(_ACTIVE, output)
        if output.final_status is _CANCELLED:
            return SchedulerResult(SchedulerStatus.CANCELLED, output, self._error)
        return SchedulerResult(_COMPLETE, output)
