"""The order of SIGHUP: rolling children are replaced one after the other, each only when the one before it serves.

The next one is started first, and the old one leaves when it is ready. So a setting that has become wrong meanwhile (a
certificate, a file of keys) costs a line in the log, and no server. Knows slots and their children; does not watch
them: see supervisor.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from deploy.child import Child
from deploy.slot import Slot

# Time for an old process to end what it has begun, before it is killed.
RETIREMENT_SECONDS = 3600.0


class RollingRestart:
    """The state of a rolling restart. `slots` is the supervisor's list, in which a child and its successor have a
    slot each while both are there."""

    def __init__(self, slots: list[Slot], start: Callable[[Slot], None], say: Callable[[str, str], None]) -> None:
        self._slots = slots
        self._start = start
        self._say = say
        self._waiting: deque[Slot] = deque()
        # The old slot, the new slot, and the process of the new one.
        self._succession: tuple[Slot, Slot, Child] | None = None

    def begin(self) -> None:
        """Begin a restart of all rolling children, but for the one that is being replaced just now."""
        slots = [slot for slot in self._slots if slot.wanted and slot.spec.rolling]
        self._waiting = deque(slot for slot in slots if self._succession is None or slot is not self._succession[0])
        names = ", ".join(slot.spec.name for slot in slots)
        self._say("INFO", f"SIGHUP: restarting one by one: {names or 'nothing can be'}")

    def proceed(self) -> None:
        """Take the next step. Call it whenever something has happened to a child."""
        if self._succession is not None:
            self._go_on_with(*self._succession)
        while self._succession is None and self._waiting:
            self._replace(self._waiting.popleft())

    def _replace(self, slot: Slot) -> None:
        if slot.child is None:  # it has died, and is being started anew in any case
            return
        new = Slot(slot.spec, slot.policy, wanted=False)  # unless it serves one day, it is not missed
        new.epoch = slot.epoch
        self._slots.insert(self._slots.index(slot) + 1, new)
        self._start(new)
        if new.child is None:
            self._slots.remove(new)
        else:
            self._succession = slot, new, new.child

    def _go_on_with(self, old: Slot, new: Slot, child: Child) -> None:
        if new.child is not child:
            self._succession = None
            self._slots.remove(new)
            self._waiting.clear()  # the others would fare no better
            reason = f"; last error: {child.last_error}" if child.last_error else ""
            self._say("ERROR", f"{new.spec.title} was not restarted, because the next one died{reason}")
        elif new.serves:
            self._succession = None
            self._hand_over(old, new)

    def _hand_over(self, old: Slot, new: Slot) -> None:
        old.wanted = False
        new.wanted = True
        if old.child is None:  # it died, and was about to be started again
            self._slots.remove(old)
        else:
            old.let_end(time.monotonic(), RETIREMENT_SECONDS)
            old.child.retire() if old.serves else old.child.terminate()
        self._say("INFO", f"{new.spec.title} was restarted")
