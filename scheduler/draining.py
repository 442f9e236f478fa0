"""The time in which new requests wait for the end of the running ones, because an operator is about to pause."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# Seconds after which draining ends by itself when the one that asked for it does not ask on: it is gone.
SECONDS_WITHOUT_WORD = 5.0


class Drain:
    """Lasts as long as an API process asks on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = -math.inf

    @property
    def active(self) -> bool:
        """Whether new requests wait."""
        return self._clock() < self._until

    def begin(self) -> None:
        """Let new requests wait from now on."""
        self._until = self._clock() + SECONDS_WITHOUT_WORD

    def go_on(self) -> str:
        """Let new requests wait on. Returns why not: it has ended, and is not begun again."""
        if not self.active:
            return "requests no longer wait for a pause: generation was paused or resumed meanwhile"
        self.begin()
        return ""

    def end(self) -> None:
        """Let new requests run, as far as nothing else holds them."""
        self._until = -math.inf
