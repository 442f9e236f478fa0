"""A thread of each rank that tells the others how far it is, and ends this rank when another one is lost.

The main thread may wait in a sum or for its device, where nothing can wake it. So a rank whose main thread has not
ended by itself is ended here. Rank 0 names the rank that hangs or diverges; each names the one that it does not hear.
Knows numbers of steps. Does not know models, nor how ranks tell each other anything.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from model_worker.tensor_parallel.steps import Standing, Steps, are_idle, awaited

log = logging.getLogger(__name__)

# Seconds between two looks.
LOOK_SECONDS = 0.25
# The most seconds between two looks that count as waiting: a rank that was stopped itself accuses no other.
MOST_COUNTED = 1.0
# Seconds in which the main thread may end by itself, and send its last words.
_LAST_SECONDS = 2.0
# Digests that are kept for ranks that are behind.
_MOST_DIGESTS = 4096


class Mates(Protocol):
    """The other ranks, by their numbers."""

    def swap(self, own: Standing, waited: float) -> Sequence[Standing]:
        """Tell the others how far this rank is. Returns all ranks', on the rank that judges; else none.

        `waited` are the seconds since the last call.
        """

    def lost(self) -> str:
        """Say which rank has ended or is not heard; empty if all are there."""

    def name(self, rank: int) -> str:
        """Name a rank for people."""


class Watch(threading.Thread):
    """Looks at all ranks until one is lost, and then calls `end` with the reason. Begin it with `start`."""

    def __init__(self, steps: Steps, mates: Mates, end: Callable[[str], None]) -> None:
        super().__init__(name="ranks", daemon=True)
        self.steps = steps
        # Seconds for which the slowest rank may be awaited; none while the ranks start.
        self.patience: float | None = None
        # Why the group has ended; empty while it has not.
        self.story = ""
        self._mates = mates
        self._end = end
        self._seen: Sequence[Standing] = ()
        self._waited = 0.0
        self._digests: dict[int, int] = {}
        self._stopped = threading.Event()

    def run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(LOOK_SECONDS):
            now = time.monotonic()
            story = self.look(min(now - last, MOST_COUNTED))
            last = now
            if story:
                self.story = story
                self._end(story)
                return

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def look(self, seconds: float) -> str:
        """Say what is wrong with the group, so many seconds after the last look; empty if nothing is."""
        own = self.steps.standing()
        standings = self._mates.swap(own, seconds)
        return self._mates.lost() or (self._judge(standings, seconds) if standings else "")

    def _judge(self, standings: Sequence[Standing], seconds: float) -> str:
        if story := self._divergence(standings):
            return story
        if self.patience is None or are_idle(standings) or standings != self._seen:
            self._seen = standings
            self._waited = 0.0
            return ""
        self._waited += seconds
        if self._waited <= self.patience:
            return ""
        ranks, undone = awaited(standings)
        names = ", ".join(self._mates.name(rank) for rank in ranks)
        return f"{names} hangs: it {undone} in {self._waited:.0f} s"

    def _divergence(self, standings: Sequence[Standing]) -> str:
        """Name a rank that has summed something else than rank 0 by the end of one step."""
        own, *others = standings
        self._digests[own.ended] = own.digest
        if len(self._digests) > _MOST_DIGESTS:
            del self._digests[next(iter(self._digests))]
        for rank, other in enumerate(others, start=1):
            expected = self._digests.get(other.ended, other.digest)
            if expected != other.digest:
                numbers = f"{expected:08x} and {other.digest:08x}"
                return f"{self._mates.name(rank)} diverges: by the end of step {other.ended} sums are {numbers}"
        return ""


def end_process(wake: Callable[[], None], story: str) -> None:
    """End this process: by its main thread, which `wake` tells, or without it."""
    log.error("this rank ends: %s", story)
    wake()
    time.sleep(_LAST_SECONDS)
    logging.shutdown()
    os._exit(1)
