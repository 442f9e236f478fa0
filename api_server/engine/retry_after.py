"""When those whom the server has no room for should come again.

A refusal costs the server, too. If each of a crowd came again after a second, refusing it would take the machine from
those who are served. So whoever is turned away is told to wait about as long as it takes to serve those who were turned
away before and have not come again.

Knows times and counts of one API process. Does not know who they are.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable

LONGEST_SECONDS = 30
"""Nobody is told to wait longer: what is true now may not be true then."""
_REMEMBERED = 10_000
_MEMORY_SECONDS = 10.0


class Crowd:
    """Counts answers and those that come again, and says when one more should."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._returning: list[float] = []
        """A heap of the times at which they come."""
        self._began = self._last = clock()
        self._ended = 0.0
        """Answers of the last seconds; older ones count for less and less."""

    def turned_away(self) -> int:
        """One more is refused; after how many seconds it should come again."""
        now = self._clock()
        while self._returning and self._returning[0] <= now:
            heapq.heappop(self._returning)
        rate = self._rate(now)
        wait = min(LONGEST_SECONDS, 1 + len(self._returning) / rate) if rate else 1.0
        # Those who were turned away together must not come together.
        seconds = min(LONGEST_SECONDS, math.ceil(wait * random.uniform(0.5, 1.5)))
        if len(self._returning) < _REMEMBERED:
            heapq.heappush(self._returning, now + seconds)
        return seconds

    def _rate(self, now: float) -> float:
        """Answers that end in a second; 0 as long as none has."""
        self._age(now)
        known = -math.expm1(-max(now - self._began, 1e-3) / _MEMORY_SECONDS)
        return self._ended / _MEMORY_SECONDS / known

    def _age(self, now: float) -> None:
        self._ended *= math.exp((self._last - now) / _MEMORY_SECONDS)
        self._last = now

    def served(self) -> None:
        """An answer has ended, and there is room for one more."""
        self._age(self._clock())
        self._ended += 1
