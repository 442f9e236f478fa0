"""The processes of this machine's workers: their end is seen at once, and one that hangs is killed.

Knows pids, descriptors and stack files. `health.py` decides which worker hangs. Workers of other machines are not
watched here: the scheduler sends them `Retire`.
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

# A stalled process has this long to write its stack.
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
    """Registers descriptors with `poller`. The caller passes those that are ready to `ended`."""

    def __init__(
        self, poller: zmq.Poller, stack_file: Callable[[int], Path], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._poller = poller
        self._stack_file = stack_file
        self._by_sentinel: dict[int, _Process] = {}
        self._stalled: list[_Stalled] = []
        self._clock = clock

    def add(self, index: int, epoch: int, pid: int) -> bool:
        """Watch a process. Returns False if it has ended already."""
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
        """Index and epoch of each process that is among `ready`. It is not watched any more."""
        found = [self._by_sentinel[key] for key in ready if isinstance(key, int) and key in self._by_sentinel]
        for process in found:
            self._poller.unregister(process.sentinel)
            del self._by_sentinel[process.sentinel]
            os.close(process.sentinel)
        return [(process.index, process.epoch) for process in found]

    def mark_stalled(self, index: int, epoch: int, story: str) -> None:
        """Ask a worker that hangs for its stack, and have `kill_due` kill it after the grace period."""
        process = next((p for p in self._by_sentinel.values() if (p.index, p.epoch) == (index, epoch)), None)
        if process is None:
            log.error("%s", story)
            return
        # A stopped process answers once it is continued. What it computes then is ignored: its epoch is fenced.
        for number in (signal.SIGUSR2, signal.SIGCONT):
            _signal(process, number)
        self._stalled.append(_Stalled(process, story, self._clock() + GRACE_SECONDS))

    def kill_due(self) -> list[str]:
        """Kill the stalled workers whose grace period is over. Returns their stories, each with its last frame."""
        now = self._clock()
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
    """Signal a process whose sentinel is open. While it is, the pid cannot belong to another process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process.pid, number)
