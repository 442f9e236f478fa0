"""The weights of one worker: which version it computes with, and what it was asked about them and has not answered.

Knows numbers of versions and commands. Does not know files.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from interfaces import WeightsCommand, WeightsTask

# Seconds without an answer of a worker that changes its weights, after which it seems to hang.
CHANGE_SECONDS = 900.0
# Tasks that a worker carries out beside steps.
_BESIDE = frozenset((WeightsTask.JOIN, WeightsTask.LEAVE, WeightsTask.RECEIVE))


class WorkerWeights:
    """`number` is the version that the worker started with."""

    def __init__(self, number: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.number = number
        # Whether it computes with the version that is served, and its memory is there.
        self.current = False
        self._clock = clock
        self._open: dict[int, WeightsCommand] = {}
        self._unsent: list[WeightsCommand] = []
        self._since = clock()

    @property
    def ready(self) -> bool:
        """Whether steps may be sent."""
        return self.current and not self.busy

    @property
    def busy(self) -> bool:
        """Whether the worker does something that steps must wait for."""
        return any(command.task not in _BESIDE for command in self._open.values())

    def ask(self, command: WeightsCommand) -> None:
        """Send a command with the next messages."""
        if not self._open:
            self._since = self._clock()
        if command.task != WeightsTask.ABANDON:
            self._open[command.number] = command
        self._unsent.append(command)

    def answered(self, number: int) -> WeightsCommand | None:
        """Return the command that a report answers, if it waits for one."""
        self._since = self._clock()
        return self._open.pop(number, None)

    def take_messages(self) -> list[WeightsCommand]:
        """What the worker must be sent before its next step."""
        unsent = self._unsent
        if unsent:
            self._unsent = []
        return unsent

    def lateness(self) -> float | None:
        """Seconds that the worker has taken where it takes too long; None while it does not."""
        if not self.busy:
            return None
        taken = self._clock() - self._since
        return taken if taken > CHANGE_SECONDS else None

    def grant_grace(self) -> None:
        """Count the time of changes from now."""
        self._since = self._clock()
