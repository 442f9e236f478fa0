"""Streams that outlive their connection: a client names its request, and any replica can reattach to it by the name.

Memory is bounded. Ended and orphaned streams are kept for a minute, and the number of ended ones has a limit. A
sequence holds every token it has produced, so that nothing else needs to be stored.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from interfaces import Finish, LogprobMode, LogprobReports, RequestError, Submit, TextContext
from scheduler.outbox import Outbox
from scheduler.rows import RowTable
from scheduler.sequence import Sequence

SECONDS_KEPT = 60.0
MAX_ENDED = 512


@dataclass(slots=True)
class Stream:
    """A named request, and what was published about it beside the tokens."""

    sequence: Sequence
    # When its client left; None while one is attached.
    orphaned_at: float | None = None
    # A code of `Finish`.
    finished: int = Finish.ACTIVE
    error: RequestError | None = None
    logprobs: list[float] = field(default_factory=list)
    reports: list[LogprobReports] = field(default_factory=list)

    def has_all(self, asked: TextContext) -> bool:
        """Whether everything that this client still needs is here.

        An earlier scheduler may have published more tokens or log-probabilities. Hidden states are not kept.
        """
        sampling = self.sequence.sampling
        emitted = self.sequence.emitted
        if asked.hidden_states or asked.tokens.generated_length > emitted:
            return False
        wanted = sampling.logprobs != LogprobMode.NONE or sampling.reports
        return not wanted or len(self.logprobs) == emitted

    def replay(self, outbox: Outbox, replica: int, handle: int, listener: TextContext) -> None:
        """Publish again what `listener` does not have yet, and the end if there was one."""
        first = listener.tokens.generated_length
        tokens = np.array(self.sequence.tokens.generated[first:], np.int32)
        ends = np.zeros(len(tokens), np.int8)
        with_token = self.finished in (Finish.STOP, Finish.LENGTH) and len(tokens) > 0
        if with_token:
            ends[-1] = self.finished
        for published in self.reports:
            positions = published.positions
            missing = (positions < self.sequence.prompt_len) | (positions >= len(listener.tokens))
            reports = published.select(missing)
            owners = np.full(len(reports.owners), handle, np.int32)
            outbox.reports(np.full(len(owners), replica, np.int32), replace(reports, owners=owners))
        for position, name in self.sequence.versions.items():
            outbox.version(replica, handle, position, name)
        if len(tokens):
            whole = len(self.logprobs) == self.sequence.emitted
            logprobs = np.array(self.logprobs[first:], np.float32) if whole else None
            handles = np.full(len(tokens), handle, np.int32)
            outbox.tokens_for(replica, handles, tokens, ends, logprobs)
        if self.finished != Finish.ACTIVE and not with_token:
            outbox.end(replica, handle, self.finished, self.error)

    def continues(self, submit: Submit) -> bool:
        """Whether this stream answers the request of `submit`."""
        mine = self.sequence.context
        theirs = submit.text
        return np.array_equal(mine.tokens.prompt, theirs.tokens.prompt) and (
            mine.sampling_params == theirs.sampling_params
        )


class ResumableStreams:
    """Named requests, by tenant and name."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._open: dict[tuple[str, str], Stream] = {}
        self._ended: OrderedDict[tuple[str, str], tuple[float, Stream]] = OrderedDict()
        self._clock = clock

    def add(self, sequence: Sequence) -> None:
        if sequence.scheduling.resume:
            self._open[_key(sequence)] = Stream(sequence)

    def find(self, submit: Submit) -> Stream | None:
        if not submit.scheduling.resume:
            return None
        key = (submit.scheduling.tenant, submit.scheduling.resume)
        ended = self._ended.get(key)
        return self._open.get(key) or (ended[1] if ended else None)

    def of(self, sequence: Sequence | None) -> Stream | None:
        """The stream of an open request; None if the request has no name."""
        return self._open.get(_key(sequence)) if sequence is not None and sequence.scheduling.resume else None

    def append_logprobs(self, table: RowTable, rows: NDArray[np.int32], logprobs: NDArray[np.float32] | None) -> None:
        """Keep the log-probabilities of the rows' new tokens."""
        if not self._open:
            return
        values = [0.0] * len(rows) if logprobs is None else logprobs.tolist()
        for row, logprob in zip(rows.tolist(), values, strict=True):
            stream = self.of(table.sequences[row])
            if stream is not None:
                stream.logprobs.append(logprob)

    def append_reports(self, table: RowTable, reports: LogprobReports) -> None:
        """Keep reports whose owners are rows."""
        for row in np.unique(reports.owners).tolist() if self._open else ():
            stream = self.of(table.sequences[row])
            if stream is not None:
                stream.reports.append(reports.select(reports.owners == row))

    def orphan(self, stream: Stream) -> None:
        """Start the time in which a client may reattach."""
        stream.orphaned_at = self._clock()

    def end(self, sequence: Sequence, code: int, error: RequestError | None) -> None:
        """Keep the end of a request for a while. A cancelled request leaves nothing."""
        stream = self._open.pop(_key(sequence), None) if sequence.scheduling.resume else None
        if stream is None or code == Finish.CANCELLED:
            return
        stream.finished = code
        stream.error = error
        self._ended[_key(sequence)] = (self._clock(), stream)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def expired(self) -> list[Sequence]:
        """Open requests to which no client has come back in time. Forgets ended ones whose time is over."""
        now = self._clock()
        while self._ended and now - next(iter(self._ended.values()))[0] > SECONDS_KEPT:
            self._ended.popitem(last=False)
        streams = self._open.values()
        return [s.sequence for s in streams if s.orphaned_at is not None and now - s.orphaned_at > SECONDS_KEPT]


def _key(sequence: Sequence) -> tuple[str, str]:
    return (sequence.scheduling.tenant, sequence.scheduling.resume)
