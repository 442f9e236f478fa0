"""The steps of a rank, counted as it begins them and as their end is seen, and who is awaited when none of them ends.

A GPU computes a step after the host has launched it, with the sums in it, and the hosts of all ranks wait for the same
event. So a rank's host writes down what it has launched and what has ended: the rank that others wait for has begun
fewer. Knows numbers and events. Does not know how ranks tell each other their numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

# Returns how many sums and gathers have begun, and a digest of them.
Counts = Callable[[], tuple[int, int]]
# A rank's steps that have begun and whose end was not seen.
_MOST_OPEN = 4096


class Event(Protocol):
    """What of torch.cuda.Event is used."""

    def record(self) -> None: ...
    def query(self) -> bool: ...


@dataclass(frozen=True)
class Standing:
    """How far a rank has come: its last step that has begun, and that has ended; and sums and gathers, if they count.

    `digest` is one of all that it has summed and gathered by the end of its last step.
    """

    begun: int = 0
    ended: int = 0
    exchanges: int = 0
    digest: int = 0


class Steps:
    """Counts the steps of this rank. `event` makes events of its device; on a CPU a step has ended when it returns."""

    def __init__(self, event: Callable[[], Event] | None, exchanges: Counts = lambda: (0, 0)) -> None:
        self._event = event
        self._exchanges = exchanges
        self._begun = 0
        # The last step that has ended, and the digest by then: one value, since two threads use it.
        self._last = 0, 0
        self._open: deque[tuple[int, Event]] = deque(maxlen=_MOST_OPEN)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count a step that is computed, or launched, in this context."""
        self._begun += 1
        try:
            yield
        except BaseException:
            # The others may not have got it: they are not to be awaited for it.
            self._begun -= 1
            raise
        if self._event is None:
            self._last = self._begun, self._exchanges()[1]
            return
        event = self._event()
        event.record()
        self._open.append((self._begun, event))

    def standing(self) -> Standing:
        """Look which steps have ended. May be called in another thread than `step`."""
        while self._open and self._open[0][1].query():
            self._last = self._open.popleft()[0], 0
        ended, digest = self._last
        return Standing(self._begun, ended, self._exchanges()[0], digest)


def steps_on(device: torch.device, exchanges: Counts = lambda: (0, 0)) -> Steps:
    """Return the counter of a rank's steps on a device."""
    return Steps(torch.cuda.Event if device.type == "cuda" else None, exchanges)


def are_idle(standings: Sequence[Standing]) -> bool:
    """Whether all ranks have ended what any of them has begun."""
    step = max(standing.begun for standing in standings)
    return all(standing.ended == step for standing in standings)


def awaited(standings: Sequence[Standing]) -> tuple[list[int], str]:
    """Return the ranks that the others wait for, and what they have not done."""
    step = max(standing.begun for standing in standings)
    if late := [rank for rank, standing in enumerate(standings) if standing.begun < step]:
        return late, f"has not begun step {step}"
    open_ones = [rank for rank, standing in enumerate(standings) if standing.ended < step]
    most = max(standing.exchanges for standing in standings)
    if late := [rank for rank in open_ones if standings[rank].exchanges < most]:
        return late, f"has not come to exchange {most}, in step {step}"
    return open_ones, f"has begun step {step} and not ended it"
