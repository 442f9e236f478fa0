"""Finds the children that hang: that live and are not heard.

A child that serves sends a heartbeat every few seconds (shared/phases.py: beat). One that is silent for too long is
asked for its stack, continued if it was only stopped, and killed when it stays silent: then the supervisor replaces it
as any that has died. Time during which this process itself stood still does not count as silence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from deploy.child import Child, ChildSpec
from shared.liveness import last_frame, nudge

LOOK_SECONDS = 1.0
# Seconds of silence, with a quarter of the allowed silence, after which a child is named in metrics and by `tokenyard
# status`.
QUIET_SECONDS = 8.0
# Silence that is allowed during a start: weights may be many and come over a slow network.
START_SECONDS = 1800.0
# A look that comes so late means that this process was stopped, or the whole machine suspended.
STANDSTILL_SECONDS = 5.0
SECONDS_FOR_LAST_WORDS = 2.0
_STACK_LINES = 60


class Observer(Protocol):
    """Gets silences and kills. `silent`: seconds since a child was heard; 0 when it speaks again. `hung`: it is
    being killed."""

    def output(self, line: str) -> None: ...
    def say(self, level: str, text: str) -> None: ...
    def silent(self, child: ChildSpec, seconds: float) -> None: ...
    def hung(self, child: ChildSpec) -> None: ...


class HangWatch:
    """Kills children that hang, and reports to `observer`."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        # When each child is killed: None while it may be silent, infinity when it has been killed.
        self._quiet: dict[Child, float | None] = {}
        self.next_look = time.monotonic() + LOOK_SECONDS

    def look(self, children: Iterable[Child]) -> None:
        """Judge the children whose spec has a limit. Call it at `next_look`; sooner it does nothing."""
        now = time.monotonic()
        if now < self.next_look:
            return
        late = now - self.next_look
        self.next_look = now + LOOK_SECONDS
        watched = [child for child in children if child.spec.hang_seconds is not None]
        self._quiet = {child: due for child, due in self._quiet.items() if child in watched}
        if late > STANDSTILL_SECONDS:
            self._observer.say("WARNING", f"this process stood still for {late:.1f} s; nothing counts as silent for it")
            for child in watched:
                child.heard_at = now
        for child in watched:
            self._judge(child, now, now - child.heard_at)

    def _judge(self, child: Child, now: float, silent: float) -> None:
        limit = child.spec.hang_seconds or 0.0
        if child.beating is None:
            if silent > START_SECONDS and child not in self._quiet:
                self._kill(child, silent)
        elif silent < max(QUIET_SECONDS, limit / 4):
            self._welcome_back(child)
        elif child not in self._quiet:
            self._quiet[child] = None
            self._observer.silent(child.spec, silent)
        elif self._quiet[child] is None:
            if silent > limit:
                self._quiet[child] = now + SECONDS_FOR_LAST_WORDS
                nudge(child.beating, child.pid, bool(child.spec.stack_file))
        elif now >= (self._quiet[child] or 0.0):
            self._kill(child, silent)

    def _welcome_back(self, child: Child) -> None:
        if child not in self._quiet:
            return
        if self._quiet.pop(child) is not None:
            self._observer.say("WARNING", f"{child.spec.title} had stopped and goes on: it is not replaced")
        self._observer.silent(child.spec, 0.0)

    def _kill(self, child: Child, silent: float) -> None:
        self._quiet[child] = math.inf
        file = Path(child.spec.stack_file)
        frame = last_frame(file) if child.beating is not None else ""
        child.verdict = f"it hung, silent for {silent:.0f} s; last Python frame: {frame or 'unknown'}"
        if frame:
            for line in file.read_text(errors="replace").splitlines()[:_STACK_LINES]:
                self._observer.output(line)
        self._observer.hung(child.spec)
        child.kill()
