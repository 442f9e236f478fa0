"""Results for the API replicas, gathered over one iteration of the loop: each replica gets one message a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from interfaces import Finish, HiddenStates, LogprobReports, PooledValues, RequestError, Results, Vectors

_NO_TOKEN = np.array([-1], np.int32)


class _Part(NamedTuple):
    """One token for each of several requests."""

    handles: NDArray[np.int32]
    tokens: NDArray[np.int32]
    finished: NDArray[np.int8]
    logprobs: NDArray[np.float32] | None


# A message may carry reports alone.
_EMPTY = _Part(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int8), None)


@dataclass(slots=True)
class _Extras:
    """Everything beside tokens, which few steps publish."""

    reports: list[LogprobReports] = field(default_factory=list)
    hidden: list[HiddenStates] = field(default_factory=list)
    cached: dict[int, int] = field(default_factory=dict)
    errors: dict[int, RequestError] = field(default_factory=dict)
    queued: dict[int, int] = field(default_factory=dict)
    guesses: dict[int, list[int]] = field(default_factory=dict)
    versions: dict[int, dict[int, str]] = field(default_factory=dict)


class Outbox:
    """Unsent results by replica number."""

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._parts: dict[int, list[_Part]] = {}
        self._extras: dict[int, _Extras] = {}
        self._vectors: list[tuple[int, Vectors]] = []

    def tokens(
        self,
        replicas: NDArray[np.int32],
        handles: NDArray[np.int32],
        tokens: NDArray[np.int32],
        finished: NDArray[np.int8],
        logprobs: NDArray[np.float32] | None,
    ) -> None:
        """Publish one token for each handle."""
        first = int(replicas[0])
        if (replicas == first).all():
            self.tokens_for(first, handles, tokens, finished, logprobs)
            return
        for replica in np.unique(replicas).tolist():
            mine = replicas == replica
            part = None if logprobs is None else logprobs[mine]
            self._add(replica, _Part(handles[mine], tokens[mine], finished[mine], part))

    def tokens_for(
        self,
        replica: int,
        handles: NDArray[np.int32],
        tokens: NDArray[np.int32],
        finished: NDArray[np.int8],
        logprobs: NDArray[np.float32] | None,
    ) -> None:
        """Publish one token for each handle of the same replica."""
        self._add(replica, _Part(handles, tokens, finished, logprobs))

    def reports(self, replicas: NDArray[np.int32], reports: LogprobReports) -> None:
        """Publish log-probabilities of tokens, by handle. Entry i goes to `replicas[i]`."""
        for replica in np.unique(replicas).tolist():
            self._extras_of(replica).reports.append(reports.select(replicas == replica))

    def hidden(self, replicas: NDArray[np.int32], hidden: HiddenStates) -> None:
        """Publish hidden states of tokens, by handle. Entry i goes to `replicas[i]`."""
        for replica in np.unique(replicas).tolist():
            self._extras_of(replica).hidden.append(hidden.select(replicas == replica))

    def vectors(self, replica: int, handle: int, first: int, values: PooledValues, queued_us: int) -> None:
        """Publish the values of texts of a one-shot request, from index `first` on."""
        self._vectors.append((replica, Vectors(self._incarnation, handle, first, values, queued_us)))

    def preview(self, replica: int, handle: int, index: int, values: PooledValues, number: int) -> None:
        """Publish a preview of image `index` of a request."""
        self._vectors.append((replica, Vectors(self._incarnation, handle, index, values, preview=number)))

    def placed(self, replica: int, handle: int, cached: int, queued_us: int) -> None:
        """Publish how many prompt tokens of a request were cached, and how long it waited.

        Comes before the request's first token, in the same message.
        """
        extras = self._extras_of(replica)
        extras.queued[handle] = queued_us
        if cached:
            extras.cached[handle] = cached

    def guesses(self, replica: int, handle: int, guessed: int, right: int) -> None:
        """Publish how many guesses at an answer were computed, and how many were right."""
        self._extras_of(replica).guesses[handle] = [guessed, right]

    def version(self, replica: int, handle: int, first: int, name: str) -> None:
        """Publish the version of the weights that makes a request's tokens from the generated token `first` on."""
        self._extras_of(replica).versions.setdefault(handle, {})[first] = name

    def end(self, replica: int, handle: int, code: int, error: RequestError | None = None) -> None:
        """Publish the end of a request without a token."""
        self._add(replica, _Part(np.array([handle], np.int32), _NO_TOKEN, np.array([code], np.int8), None))
        if error is not None:
            self._extras_of(replica).errors[handle] = error

    def fail(self, replica: int, handle: int, error: RequestError) -> None:
        """Publish the failure of a request."""
        self.end(replica, handle, Finish.FAILED, error)

    def take_vectors(self) -> list[tuple[int, Vectors]]:
        """The values to send now, by replica number. Empties the outbox of them."""
        taken = self._vectors
        self._vectors = []
        return taken

    def take(self) -> list[tuple[int, Results]]:
        """The results to send now, by replica number. Empties the outbox of them."""
        ready = [(replica, self._results(replica, parts)) for replica, parts in self._parts.items()]
        self._parts.clear()
        self._extras.clear()
        return ready

    def _results(self, replica: int, parts: list[_Part]) -> Results:
        columns = _joined(parts)
        extras = self._extras.get(replica)
        if extras is None:
            return Results(self._incarnation, *columns)
        return Results(
            self._incarnation,
            *columns,
            cached=extras.cached,
            errors=extras.errors,
            queued=extras.queued,
            guesses=extras.guesses,
            versions=extras.versions,
            reports=LogprobReports.joined(extras.reports) if extras.reports else None,
            hidden=HiddenStates.joined(extras.hidden) if extras.hidden else None,
        )

    def _add(self, replica: int, part: _Part) -> None:
        parts = self._parts.get(replica)
        if parts is None:
            self._parts[replica] = [part]
        else:
            parts.append(part)

    def _extras_of(self, replica: int) -> _Extras:
        self._parts.setdefault(replica, [])  # a message may have extras alone
        return self._extras.setdefault(replica, _Extras())


def _joined(parts: list[_Part]) -> _Part:
    """All parts as one. Log-probabilities are zero for entries that have none."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return _EMPTY
    handles, tokens, finished, logprobs = zip(*parts, strict=True)
    joined = np.concatenate(handles), np.concatenate(tokens), np.concatenate(finished)
    if all(part is None for part in logprobs):
        return _Part(*joined, None)
    entries = zip(tokens, logprobs, strict=True)
    filled = [np.zeros(len(of), np.float32) if part is None else part for of, part in entries]
    return _Part(*joined, np.concatenate(filled))
