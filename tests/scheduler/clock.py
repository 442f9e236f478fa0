"""A clock that a test advances."""

from __future__ import annotations


class Clock:
    """Starts at `now`. Each reading is a microsecond later, so that nothing takes no time at all."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
