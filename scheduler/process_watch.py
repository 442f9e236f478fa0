"""The processes of this machine's workers: their end is noticed at once, and one that hangs is ended.

Knows pids, descriptors and stack files. What a worker was computing, and what becomes of that, is `core.py`'s matter.
Workers of other machines are not watched here: the scheduler tells them to retire.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from shared.liveness import last_frame, open_pidfd

log = logging.getLogger(__name__)

GRACE_SECONDS = 0.5


@dataclass(frozen=True)
class _Process:
    index: int
    epoch: int
    pid: int
    sentinel: int


@dataclass(frozen=True)
class _Stalled:
    process: _Process
    story: str
    due: float


class ProcessWatch:
    """Descriptors are registered with `poller`; those that it says are ready are to be shown to `ended`."""

    def __init__(self, poller: zmq.Poller, stack_file: Callable[[int], Path]) -> None:
        self._poller = poller
        self._stack_file = stack_file
        self._by_sentinel: dict[int, _Process] = {}
        self._stalled: list[_Stalled] = []

    def add(self, index: int, epoch: int, pid: int) -> bool:
        """False when the process has ended already."""
        try:
            sentinel = open_pidfd(pid)
        except ProcessLookupError:
            return False
        except OSError as error:
            log.warning("worker %d (pid %d) cannot be watched: %s", index, pid, error)
            return True
        self._by_sentinel[sentinel] = _Process(index, epoch, pid, sentinel)
        self._poller.register(sentinel, zmq.POLLIN)
        return True

    def ended(self, ready: Sequence[object]) -> list[tuple[int, int]]:
        """Index and epoch of each process that is among `ready`; it is not watched any more."""
        found = [self._by_sentinel[key] for key in ready if isinstance(key, int) and key in self._by_sentinel]
        for process in found:
            self._poller.unregister(process.sentinel)
            del self._by_sentinel[process.sentinel]
            os.close(process.sentinel)
        return [(process.index, process.epoch) for process in found]

    def mark_stalled(self, index: int, epoch: int, story: str) -> None:
        """This worker hangs. It is asked where, and ended soon, by `kill_due`; until then `story` is kept."""
        process = next((p for p in self._by_sentinel.values() if (p.index, p.epoch) == (index, epoch)), None)
        if process is None:
            log.error("%s", story)
            return
        # A stopped process answers once it is continued; what it computes then is ignored, it is of a lost epoch.
        for number in (signal.SIGUSR2, signal.SIGCONT):
            _signal(process, number)
        self._stalled.append(_Stalled(process, story, time.monotonic() + GRACE_SECONDS))

    def kill_due(self, now: float) -> list[str]:
        """Ends those whose time is up; their stories, each with the frame in which it hung."""
        due = [one for one in self._stalled if one.due <= now]
        self._stalled = [one for one in self._stalled if one.due > now]
        stories = []
        for one in due:
            frame = last_frame(self._stack_file(one.process.index))
            stories.append(f"{one.story}; last Python frame: {frame or 'unknown, it did not answer SIGUSR2'}; killed")
            if one.process.sentinel in self._by_sentinel:
                _signal(one.process, signal.SIGKILL)
        return stories


def _signal(process: _Process, number: signal.Signals) -> None:
    """To a process whose sentinel is still open, so that its pid cannot be another's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process.pid, number)
