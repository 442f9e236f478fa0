"""News for the API replicas, gathered over one turn of the loop, so that each replica gets one message a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from interfaces import Finish, RequestError, Results
from interfaces.hidden_states import HiddenStates
from interfaces.logprob_reports import LogprobReports

# A message may carry reports alone.
_NO_ENTRY = np.empty(0, np.int32)
_NO_CODE = np.empty(0, np.int8)

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(slots=True)
class _Columns:
    handles: list[NDArray[np.int32]] = field(default_factory=list)
    tokens: list[NDArray[np.int32]] = field(default_factory=list)
    finished: list[NDArray[np.int8]] = field(default_factory=list)
    logprobs: list[NDArray[np.float32] | None] = field(default_factory=list)
    reports: list[LogprobReports] = field(default_factory=list)
    hidden: list[HiddenStates] = field(default_factory=list)
    cached: dict[int, int] = field(default_factory=dict)
    errors: dict[int, RequestError] = field(default_factory=dict)
    queued: dict[int, int] = field(default_factory=dict)

    def add(
        self,
        handles: NDArray[np.int32],
        tokens: NDArray[np.int32],
        finished: NDArray[np.int8],
        logprobs: NDArray[np.float32] | None,
    ) -> None:
        self.handles.append(handles)
        self.tokens.append(tokens)
        self.finished.append(finished)
        self.logprobs.append(logprobs)

    @property
    def any_logprobs(self) -> bool:
        return any(part is not None for part in self.logprobs)

    def all_logprobs(self) -> NDArray[np.float32]:
        """Zero for entries that have none."""
        parts = zip(self.handles, self.logprobs, strict=True)
        return np.concatenate([np.zeros(len(h), np.float32) if part is None else part for h, part in parts])


class Outbox:
    """Columns of `Results` by replica number."""

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._columns: dict[int, _Columns] = {}

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
            self._of(replica).add(handles[mine], tokens[mine], finished[mine], part)

    def tokens_for(
        self,
        replica: int,
        handles: NDArray[np.int32],
        tokens: NDArray[np.int32],
        finished: NDArray[np.int8],
        logprobs: NDArray[np.float32] | None,
    ) -> None:
        """The same where all of them are this replica's."""
        self._of(replica).add(handles, tokens, finished, logprobs)

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
        columns = self._of(replica)
        columns.queued[handle] = queued_us
        if cached:
            columns.cached[handle] = cached

    def end(self, replica: int, handle: int, code: int, error: RequestError | None = None) -> None:
        """A request ends without a token."""
        columns = self._of(replica)
        columns.add(np.array([handle], np.int32), np.array([-1], np.int32), np.array([code], np.int8), None)
        if error is not None:
            columns.errors[handle] = error

    def fail(self, replica: int, handle: int, error: RequestError) -> None:
        """A request fails for a reason of its own."""
        self.end(replica, handle, Finish.FAILED, error)

    def take(self) -> list[tuple[int, Results]]:
        """What is to be sent now, by replica number; the outbox is empty afterwards."""
        ready = [(replica, self._results(columns)) for replica, columns in self._columns.items()]
        self._columns = {}
        return ready

    def _of(self, replica: int) -> _Columns:
        columns = self._columns.get(replica)
        if columns is None:
            columns = self._columns[replica] = _Columns()
        return columns

    def _results(self, columns: _Columns) -> Results:
        return Results(
            incarnation=self._incarnation,
            handles=_joined(columns.handles, _NO_ENTRY),
            tokens=_joined(columns.tokens, _NO_ENTRY),
            finished=_joined(columns.finished, _NO_CODE),
            logprobs=columns.all_logprobs() if columns.any_logprobs else None,
            cached=columns.cached,
            errors=columns.errors,
            queued=columns.queued,
            reports=LogprobReports.joined(columns.reports) if columns.reports else None,
            hidden=HiddenStates.joined(columns.hidden) if columns.hidden else None,
        )


def _joined(parts: list[NDArray[_Number]], empty: NDArray[_Number]) -> NDArray[_Number]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else empty
