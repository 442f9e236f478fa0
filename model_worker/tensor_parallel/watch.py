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
# Seconds in which the last words to the other ranks may leave.
_SENDING_SECONDS = 0.1
# Digests that are kept for ranks that are behind.
_MOST_DIGESTS = 4096


class Mates(Protocol):
    """The other ranks, by their numbers."""

    def swap(self, own: Standing, waited: float) -> Sequence[Standing]:
        """Tell the others how far this rank is. Returns all ranks', on the rank that judges; else none.

        `waited` are the seconds since the last call.
        """

    # Each word to the other ranks has it: why this rank ends, and whether what it computes may be the reason.
    parting: tuple[str, bool]

    @property
    def blamed(self) -> bool:
        """Whether what is computed may be the reason of the loss that `lost` says."""

    def lost(self) -> str:
        """Say which rank has ended or is not heard; empty if all are there."""

    def name(self, rank: int) -> str:
        """Name a rank for people."""


class Watch(threading.Thread):
    """Looks at all ranks until one is lost, and then calls `wake`, and `end` later. Begin it with `start`."""

    def __init__(
        self, steps: Steps, mates: Mates, end: Callable[[], None], wake: Callable[[], None] = lambda: None
    ) -> None:
        """`wake` has the main thread end by itself; where it has not in some seconds, `end` ends the process."""
        super().__init__(name="ranks", daemon=True)
        self.steps = steps
        # Seconds for which the slowest rank may be awaited; none while the ranks start.
        self.patience: float | None = None
        # Why the group has ended; empty while it has not.
        self.story = ""
        # Whether what was being computed may be the reason.
        self.blamed = False
        self._mates = mates
        self._end = end
        self._wake = wake
        # Why the main thread ends.
        self._ending = "it was asked to end", False
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
                log.error("this rank ends: %s", story)
                self._wake()
                # The main thread's step may need the other ranks, so this rank tells them when that step has ended.
                ended = self._stopped.wait(_LAST_SECONDS)
                self._part(story, self.blamed)
                if not ended:
                    self._end()
                return
        self._part(*self._ending)

    def finish(self, story: str = "", blamed: bool = False) -> None:
        """The main thread ends: tell the others why. What was lost before is the reason, and else an order."""
        if story:
            self._ending = story, blamed
        self._stopped.set()
        if self.is_alive():
            self.join(_LAST_SECONDS)

    def leave(self) -> None:
        """Tell the others that this rank was asked to end; until rank 0 has ended it goes on."""
        self._mates.parting = self._ending

    def _part(self, story: str, blamed: bool) -> None:
        self._mates.parting = story, blamed
        self._mates.swap(self.steps.standing(), 0.0)
        # The words leave in another thread.
        time.sleep(_SENDING_SECONDS)

    def look(self, seconds: float) -> str:
        """Say what is wrong with the group, so many seconds after the last look; empty if nothing is."""
        own = self.steps.standing()
        standings = self._mates.swap(own, seconds)
        lost = self._mates.lost()
        self.blamed = self._mates.blamed if lost else True
        return lost or (self._judge(standings, seconds) if standings else "")

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


def end_process() -> None:
    """End this process without its main thread, which may wait for ever."""
    logging.shutdown()
    os._exit(1)
