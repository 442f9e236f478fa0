"""Estimates when refused requests should come again (Retry-After).

A refusal costs the server, too. If every refused client came again after a second, refusing them would take the
machine from those who are served. The delay is therefore about as long as it takes to serve all those that were
refused before and have not come again.

Knows times and counts of one API process. Does not know clients.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable

# Longest delay: an estimate is not reliable for longer.
LONGEST_SECONDS = 30
_REMEMBERED = 10_000
_MEMORY_SECONDS = 10.0


class RetryAfterEstimator:
    """Counts answers and expected retries, and estimates the Retry-After of the next refusal."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # A heap of the times at which refused requests are expected again.
        self._returning: list[float] = []
        self._began = self._last = clock()
        # Answers of the last seconds, decayed: older ones count for less and less.
        self._ended = 0.0

    def record_refusal(self) -> int:
        """Records a refusal; returns its Retry-After in seconds."""
        now = self._clock()
        while self._returning and self._returning[0] <= now:
            heapq.heappop(self._returning)
        rate = self._rate(now)
        wait = min(LONGEST_SECONDS, 1 + len(self._returning) / rate) if rate else 1.0
        # Requests that were refused together must not come together.
        seconds = min(LONGEST_SECONDS, math.ceil(wait * random.uniform(0.5, 1.5)))
        if len(self._returning) < _REMEMBERED:
            heapq.heappush(self._returning, now + seconds)
        return seconds

    def _rate(self, now: float) -> float:
        """Answers that end per second; 0 as long as none has."""
        self._age(now)
        known = -math.expm1(-max(now - self._began, 1e-3) / _MEMORY_SECONDS)
        return self._ended / _MEMORY_SECONDS / known

    def _age(self, now: float) -> None:
        self._ended *= math.exp((self._last - now) / _MEMORY_SECONDS)
        self._last = now

    def served(self) -> None:
        """Records the end of an answer, which makes room for one more."""
        self._age(self._clock())
        self._ended += 1
