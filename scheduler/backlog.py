"""How many seconds of work wait: one figure for autoscalers.

It is the time of the prompt tokens that are still to be computed, by the measured speed of the workers, and the wait
for a row where more requests wait than rows are free, by the measured rate at which requests end. Unknown speeds count
as none: a server that has computed nothing has no backlog that it could measure.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from scheduler.open_requests import OpenRequests

# Seconds over which the rate of ends is averaged.
AVERAGED_SECONDS = 30.0


class Backlog:
    """Learns at each `seconds` how many requests have ended since the last one."""

    def __init__(self, requests: OpenRequests, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = requests
        self._clock = clock
        self._ended_before = 0
        self._asked = clock()
        self._ends_per_second = 0.0

    def seconds(self) -> float:
        """The backlog now."""
        self._learn()
        requests = self._requests
        workers = list(requests.workers.values())
        rates = [1 / known for worker in workers if (known := worker.prefill_budget.token_seconds)]
        tokens = requests.waiting.tokens + sum(worker.rows.tokens_to_compute() for worker in workers)
        prefill = tokens / sum(rates) if rates else 0.0
        free = sum(worker.rows.free for worker in workers)
        without_row = max(0, len(requests.waiting) - free)
        wait = without_row / self._ends_per_second if without_row and self._ends_per_second else 0.0
        return prefill + wait

    def _learn(self) -> None:
        """Average the rate of ends over the time in which something ran."""
        now = self._clock()
        passed = now - self._asked
        ended = self._requests.counters["finished"]
        if passed <= 0:
            return
        weight = min(1.0, passed / AVERAGED_SECONDS)
        rate = (ended - self._ended_before) / passed
        if self._requests.running or rate:
            self._ends_per_second += weight * (rate - self._ends_per_second) if self._ends_per_second else rate
        self._ended_before = ended
        self._asked = now
