"""One one-shot request as the scheduler holds it: its texts, and which of them wait, are computed, or are answered.

A text is computed in one batch and needs nothing from its neighbours, so a request may be cut between any two texts.
Texts that were in a batch when a worker crashed are suspected: after two crashes each of them is computed alone, and
one that crashes a worker then, too, is poison.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from interfaces import KeptStep, PooledValues, PoolingContext, SchedulingOptions
from scheduler.adapter import Adapter
from scheduler.quarantine import CRASHES_BEFORE_ISOLATION


def kind_of(task: str, adapter: Adapter | None) -> str:
    """Return the name of a task with an adapter, or with none."""
    return task if adapter is None else f"{task} with adapter {adapter.handle}"


@dataclass(eq=False, slots=True)
class Piece:
    """The texts of a request from `first` up to and without `end`, in a batch or on their way into one."""

    request: OneShotRequest
    first: int
    end: int
    # Whether the text, which is the only one, must be alone in its batch.
    isolated: bool = False

    def __len__(self) -> int:
        return self.end - self.first

    def __str__(self) -> str:
        noun = self.request.context.noun
        return f"{noun} {self.first}" if len(self) == 1 else f"{noun}s {self.first} to {self.end - 1}"

    @property
    def tokens(self) -> int:
        return self.request.tokens_between(self.first, self.end)

    @property
    def cost(self) -> float:
        """Its computation, in usual tokens."""
        return self.tokens * self.request.context.token_cost


@dataclass(eq=False, slots=True)
class OneShotRequest:
    """Where the texts of `context` stand."""

    replica: bytes
    # The replica's name in columns.
    replica_number: int
    handle: int
    # Position by arrival. Lower came first.
    order: int
    context: PoolingContext
    # Time of arrival on the scheduler's clock.
    arrived: float
    scheduling: SchedulingOptions = field(default_factory=SchedulingOptions)
    # Whether it was in a queue before, of another scheduler.
    resubmitted: bool = False
    # None: the model itself.
    adapter: Adapter | None = None
    # Ranges of texts that are in no batch.
    waiting: deque[tuple[int, int]] = field(init=False)
    # Texts in batches, and texts that are answered.
    in_flight: int = 0
    answered: int = 0
    # Batches that its texts were in.
    batches: int = 0
    # Microseconds until its first batch; -1 before.
    queued_us: int = -1
    # When it is served next, in the virtual time of its queue.
    tag: float = 0.0
    # Whether the queue holds it.
    queued: bool = False
    ended: bool = False
    # Steps of images that are kept, by the image's place.
    kept: dict[int, KeptStep] = field(default_factory=dict)
    # Tokens before each text, or what they weigh.
    _offsets: NDArray[np.int64] = field(init=False)
    # Crashes of workers by text; None while there was none.
    _crashes: NDArray[np.int8] | None = None

    def __post_init__(self) -> None:
        self._offsets = self.context.costs
        self.waiting = deque([(0, len(self.context))])

    @property
    def kind(self) -> str:
        """What a worker must be able to do: the task, with an adapter in memory."""
        return kind_of(self.context.task, self.adapter)

    @property
    def waiting_tokens(self) -> int:
        return sum(self.tokens_between(first, end) for first, end in self.waiting)

    @property
    def returning(self) -> bool:
        """Whether it has begun, here or under another scheduler."""
        return self.resubmitted or self.batches > 0

    @property
    def complete(self) -> bool:
        return self.answered == len(self.context)

    @property
    def next_tokens(self) -> int:
        """Tokens of its next text."""
        first = self.waiting[0][0]
        return self.tokens_between(first, first + 1)

    @property
    def next_is_isolated(self) -> bool:
        """Whether its next text must be alone in a batch."""
        return self._crashes is not None and self._crashes[self.waiting[0][0]] >= CRASHES_BEFORE_ISOLATION

    def tokens_between(self, first: int, end: int) -> int:
        return int(self._offsets[end] - self._offsets[first])

    def take(self, most_tokens: int) -> Piece:
        """Take the next texts, of `most_tokens` together, or one text if it alone has more."""
        first, end = self.waiting.popleft()
        isolated = self._crashes is not None and self._crashes[first] >= CRASHES_BEFORE_ISOLATION
        reach = int(np.searchsorted(self._offsets, self._offsets[first] + most_tokens, "right")) - 1
        last = first + 1 if isolated else min(end, max(first + 1, reach))
        if self._crashes is not None and not isolated:
            suspected = np.flatnonzero(self._crashes[first:last] >= CRASHES_BEFORE_ISOLATION)
            last = first + int(suspected[0]) if len(suspected) else last
        if last < end:
            self.waiting.appendleft((last, end))
        self.in_flight += last - first
        return Piece(self, first, last, isolated)

    def give_back(self, piece: Piece) -> None:
        """Let the texts of a piece wait again, before the others."""
        self.in_flight -= len(piece)
        self.waiting.appendleft((piece.first, piece.end))

    def answer(self, piece: Piece) -> None:
        """Count the texts of a piece as answered."""
        self.in_flight -= len(piece)
        self.answered += len(piece)

    def record_crash(self, piece: Piece) -> None:
        """Count a crash of a worker that was computing a piece."""
        if self._crashes is None:
            self._crashes = np.zeros(len(self.context), np.int8)
        self._crashes[piece.first : piece.end] += 1

    def poison(self, piece: Piece) -> int | None:
        """The crashes of a text of the piece that has crashed too many workers; None if there is no such text."""
        most = 0 if self._crashes is None else int(self._crashes[piece.first : piece.end].max())
        return most if most > CRASHES_BEFORE_ISOLATION else None


def discard(values: PooledValues | None) -> None:
    """Remove the segment of values that no replica will get."""
    if values is not None:
        values.discard()
