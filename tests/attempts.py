"""Bounds of time that a busy machine may miss: one of a few attempts has to keep them."""

from __future__ import annotations

from collections.abc import Callable

ATTEMPTS = 4


def quickest(attempt: Callable[[], float], below: float) -> float:
    """The seconds of the first attempt that takes less than `below`, or of the quickest. An attempt costs its time."""
    taken: list[float] = []
    while len(taken) < ATTEMPTS:
        taken.append(attempt())
        if taken[-1] < below:
            break
    return min(taken)
