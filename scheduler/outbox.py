"""News for the API replicas, gathered over one turn of the loop, so that each replica gets one message a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from interfaces import Finish, RequestError, Results
from interfaces.hidden_states import HiddenStates
from interfaces.logprob_reports import LogprobReports

_NO_TOKEN = np.array([-1], np.int32)


class _Part(NamedTuple):
    """Tokens of some requests, one each."""

    handles: NDArray[np.int32]
    tokens: NDArray[np.int32]
    finished: NDArray[np.int8]
    logprobs: NDArray[np.float32] | None


# A message may carry reports alone.
_NOTHING = _Part(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int8), None)


@dataclass(slots=True)
class _News:
    """What one replica is to be told. Most of it few steps have."""

    parts: list[_Part] = field(default_factory=list)
    reports: list[LogprobReports] = field(default_factory=list)
    hidden: list[HiddenStates] = field(default_factory=list)
    cached: dict[int, int] = field(default_factory=dict)
    errors: dict[int, RequestError] = field(default_factory=dict)
    queued: dict[int, int] = field(default_factory=dict)

    def results(self, incarnation: int) -> Results:
        return Results(
            incarnation,
            *self._columns(),
            cached=self.cached,
            errors=self.errors,
            queued=self.queued,
            reports=LogprobReports.joined(self.reports) if self.reports else None,
            hidden=HiddenStates.joined(self.hidden) if self.hidden else None,
        )

    def _columns(self) -> _Part:
        """Of all parts; log-probabilities are zero for entries that have none."""
        if len(self.parts) == 1:
            return self.parts[0]
        if not self.parts:
            return _NOTHING
        handles, tokens, finished, logprobs = zip(*self.parts, strict=True)
        joined = np.concatenate(handles), np.concatenate(tokens), np.concatenate(finished)
        if all(part is None for part in logprobs):
            return _Part(*joined, None)
        entries = zip(tokens, logprobs, strict=True)
        filled = [np.zeros(len(of), np.float32) if part is None else part for of, part in entries]
        return _Part(*joined, np.concatenate(filled))


class Outbox:
    """News by replica number."""

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._news: dict[int, _News] = {}

    def tokens(
        self,
        replicas: NDArray[np.int32],
        handles: NDArray[np.int32],
        tokens: NDArray[np.int32],
        finished: NDArray[np.int8],
        logprobs: NDArray[np.float32] | None,
    ) -> None:
        """One token for each handle."""
        first = int(replicas[0])
        if (replicas == first).all():
            self.tokens_for(first, handles, tokens, finished, logprobs)
            return
        for replica in np.unique(replicas).tolist():
            mine = replicas == replica
            part = None if logprobs is None else logprobs[mine]
            self._of(replica).parts.append(_Part(handles[mine], tokens[mine], finished[mine], part))

    def tokens_for(
        self,
        replica: int,
        handles: NDArray[np.int32],
        tokens: NDArray[np.int32],
        finished: NDArray[np.int8],
        logprobs: NDArray[np.float32] | None,
    ) -> None:
        """The same where all of them are this replica's."""
        self._of(replica).parts.append(_Part(handles, tokens, finished, logprobs))

    def reports(self, replicas: NDArray[np.int32], reports: LogprobReports) -> None:
        """Log-probabilities of tokens, by handle; `replicas[i]` wants entry i."""
        for replica in np.unique(replicas).tolist():
            self._of(replica).reports.append(reports.select(replicas == replica))

    def hidden(self, replicas: NDArray[np.int32], hidden: HiddenStates) -> None:
        """Hidden states of tokens, by handle; `replicas[i]` wants entry i."""
        for replica in np.unique(replicas).tolist():
            self._of(replica).hidden.append(hidden.select(replicas == replica))

    def placed(self, replica: int, handle: int, cached: int, queued_us: int) -> None:
        """Tells with a request's first token how many prompt tokens came from the prefix cache, and how long it waited.

        Comes before the token itself.
        """
        news = self._of(replica)
        news.queued[handle] = queued_us
        if cached:
            news.cached[handle] = cached

    def end(self, replica: int, handle: int, code: int, error: RequestError | None = None) -> None:
        """A request ends without a token."""
        news = self._of(replica)
        news.parts.append(_Part(np.array([handle], np.int32), _NO_TOKEN, np.array([code], np.int8), None))
        if error is not None:
            news.errors[handle] = error

    def fail(self, replica: int, handle: int, error: RequestError) -> None:
        """A request fails for a reason of its own."""
        self.end(replica, handle, Finish.FAILED, error)

    def take(self) -> list[tuple[int, Results]]:
        """What is to be sent now, by replica number; the outbox is empty afterwards."""
        ready = [(replica, news.results(self._incarnation)) for replica, news in self._news.items()]
        self._news.clear()
        return ready

    def _of(self, replica: int) -> _News:
        news = self._news.get(replica)
        if news is None:
            news = self._news[replica] = _News()
        return news
