"""The batches that one worker was sent: what is in each, how large the next may be, and when one is late.

Batches are cut by time where the device is slow: everything that comes meanwhile waits for the end of a batch, and
small batches lose little there. Knows pieces and seconds of one worker.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from scheduler.oneshot_request import Piece
from scheduler.step_deadline import StepDeadline

# At most this many batches are in flight on a worker.
MAX_BATCHES = 2
# Time that a batch may take, and the tokens that it may have in any case: fewer take longer for each.
BATCH_SECONDS = 0.05
MIN_BATCH_TOKENS = 256
# While a batch of at most this length is computed the next one is sent, so that the worker never waits, and the answers
# of one are on their way while the other is computed. After a longer one the wait does not matter, and requests that
# come meanwhile may be in the next.
LONG_BATCH_SECONDS = 0.06
# Weight of a new time among those before it.
_WEIGHT = 0.3


@dataclass(slots=True)
class BatchInFlight:
    """A batch that was sent. A piece whose request has ended meanwhile stays, for the order of the results."""

    number: int
    pieces: list[Piece]
    tokens: int
    # Their computation, in usual tokens.
    cost: float
    # Time of sending on the scheduler's clock.
    sent: float

    def count_in(self, counters: Counter[str]) -> None:
        """Count its sizes by their powers of two, and add them up: see api_server/metrics/server_facts.py."""
        for name, size in (("batch_texts", sum(map(len, self.pieces))), ("batch_tokens", self.tokens)):
            counters[f"{name}<={1 << (size - 1).bit_length()}"] += 1
            counters[f"{name}<="] += size


class BatchesInFlight:
    """The batches without results, oldest first."""

    def __init__(
        self,
        deadline: StepDeadline,
        clock: Callable[[], float] = time.monotonic,
        numbers: Iterator[int] | None = None,
    ) -> None:
        """`numbers` are those of batches, which others on the worker may share."""
        self.batches: deque[BatchInFlight] = deque()
        # Batches answered.
        self.answered = 0
        # Whether the next batch must be alone on the worker, so that no step may be sent before it.
        self.wants_isolation = False
        # Steps that the worker had answered when the last batch was sent.
        self.steps_before = -1
        self.last_result = clock()
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._token_seconds: float | None = None
        self._deadline = deadline
        self._clock = clock

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def isolated(self) -> bool:
        """Whether a text that must be alone is computed."""
        return any(piece.isolated for piece in self._pieces())

    @property
    def keeps_steps_off(self) -> bool:
        """Whether no step may be sent: a text that must be alone is computed, or waits for its turn."""
        return self.wants_isolation or self.isolated

    @property
    def has_room(self) -> bool:
        """Whether the worker may get one more batch."""
        if not self.batches:
            return True
        if len(self.batches) >= MAX_BATCHES or self.isolated or self._token_seconds is None:
            return False
        return self.batches[0].cost * self._token_seconds < LONG_BATCH_SECONDS

    def budget(self, most: int, seconds: float = BATCH_SECONDS, least: int = MIN_BATCH_TOKENS) -> int:
        """Tokens of the next batch: those that take `seconds`, at least `least` and at most `most`."""
        if self._token_seconds is None:
            return min(most, least)
        return min(most, max(least, int(seconds / self._token_seconds)))

    def add(self, pieces: Sequence[Piece], steps_answered: int) -> BatchInFlight:
        """Count a batch as sent, after the worker has answered so many steps."""
        self.steps_before = steps_answered
        tokens = sum(piece.tokens for piece in pieces)
        cost = sum(piece.cost for piece in pieces)
        batch = BatchInFlight(next(self._numbers), list(pieces), tokens, cost, self._clock())
        self.batches.append(batch)
        return batch

    def has(self, number: int) -> bool:
        """Whether the oldest batch has this number."""
        return bool(self.batches) and self.batches[0].number == number

    def take(self, number: int) -> tuple[BatchInFlight, float]:
        """The batch that has this result, and the seconds it took. ValueError if the oldest one has another number."""
        if not self.has(number):
            raise ValueError(f"result of batch {number} answers no batch in flight")
        batch = self.batches.popleft()
        self.answered += 1
        seconds = self._clock() - max(batch.sent, self.last_result)
        self.last_result = self._clock()
        if not batch.cost:
            # A pass that only drops images.
            return batch, seconds
        self._deadline.learn(batch.cost, seconds)
        each = seconds / batch.cost
        known = self._token_seconds
        self._token_seconds = max(1e-9, each if known is None else known + _WEIGHT * (each - known))
        return batch, seconds

    @property
    def requests(self) -> int:
        """The number of open requests with texts in these batches."""
        return len({id(piece.request) for piece in self._pieces() if not piece.request.ended})

    @property
    def adapters(self) -> set[int]:
        """Handles of the adapters of these batches."""
        return {piece.request.adapter.handle for piece in self._pieces() if piece.request.adapter is not None}

    def describe(self) -> str:
        """The batches, for the log."""
        named = sorted({str(piece.request.context.request_id) for piece in self._pieces() if not piece.request.ended})
        shown = ", ".join(named[:8]) + (f" and {len(named) - 8} more" if len(named) > 8 else "")
        texts = sum(map(len, self._pieces()))
        noun = next((piece.request.context.noun for piece in self._pieces()), "text")
        return f"in batch {self.batches[0].number} with {texts} {noun}s of requests {shown or 'that have ended'}"

    def waited(self) -> tuple[float, float] | None:
        """Seconds that the oldest batch has taken, and seconds it is allowed; None if there is none."""
        if not self.batches:
            return None
        batch = self.batches[0]
        usual = min((piece.request.context.usual_cost for piece in batch.pieces), default=math.inf)
        return self._clock() - max(batch.sent, self.last_result), self._deadline.allowed(batch.cost, usual)

    def _pieces(self) -> Iterator[Piece]:
        return (piece for batch in self.batches for piece in batch.pieces)

    def grant_grace(self) -> None:
        """Count the time of the oldest batch from now."""
        self.last_result = self._clock()
