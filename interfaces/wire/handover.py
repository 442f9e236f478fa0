"""Large arrays that a process makes for one reader: the reader removes the segment when it has mapped it.

A segment that no reader has removed after a while is removed by its maker, whose message may have been lost, or its
reader killed; those of a maker that was killed go with the next sweep. A reader that comes too late has lost the array,
as if the message had been lost. Knows arrays and segments; knows no message.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from interfaces.wire.shared_memory import Segments, Shareable, SharedMemoryArray

# A reader that takes longer has been given up by then.
SECONDS_KEPT = 60.0


class Handover:
    """The segments that were given away, oldest first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._segments = Segments()
        self._given: deque[tuple[float, SharedMemoryArray]] = deque()
        self._clock = clock

    def give(self, array: NDArray[Any]) -> Shareable:
        """Return the stand-in for `array` in a message: a segment when it is large and there is room, else itself."""
        held = self._segments.hold(array)
        if isinstance(held, SharedMemoryArray):
            self._given.append((self._clock(), held))
        return held

    def forget_old(self) -> None:
        """Remove the segments that were given away long ago. To be called now and then."""
        now = self._clock()
        while self._given and now - self._given[0][0] > SECONDS_KEPT:
            self._segments.release([self._given.popleft()[1]])
