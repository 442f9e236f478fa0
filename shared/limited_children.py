"""Jobs that each run in a forked child of their own, with limits on its processor time, its wall time and its memory.

For work on what strangers send: exceeding a limit, or a crash, costs that job alone. The process that forks must be
small and have no threads. Knows neither the work nor the form of requests.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack

from shared.liveness import end_with_parent, limit_memory

# Exit code of a child that met an error of ours.
FAILED = 3


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one child; `memory_bytes` are those beyond the process that forks. At most `at_once` children run."""

    cpu_seconds: float
    wall_seconds: float
    memory_bytes: int
    niceness: int
    at_once: int


@dataclass
class _Child:
    """One job, and the child's output so far."""

    job: Any
    pid: int
    output: int
    deadline: float
    words: bytearray = field(default_factory=bytearray)


class LimitedChildren:
    """Does the jobs that arrive at a descriptor, in any order.

    `work` runs in a child; what it returns must be what msgpack packs. `answer` runs here: it gets the job, and the
    result, or None and the child's exit code: `FAILED`, or a signal's number below zero.
    """

    def __init__(
        self, limits: Limits, work: Callable[[Any], Any], answer: Callable[[Any, Any | None, int], None]
    ) -> None:
        self._limits = limits
        self._work = work
        self._answer = answer
        self._waiting: deque[Any] = deque()
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()

    def run(self, requests: int, unpacker: msgpack.Unpacker) -> None:
        """Run until the other end of `requests` is closed. `unpacker` may have first jobs already."""
        self._selector.register(requests, selectors.EVENT_READ)
        self._waiting.extend(unpacker)
        while True:
            while self._waiting and len(self._children) < self._limits.at_once:
                self._start(self._waiting.popleft())
            for key, _ in self._selector.select(timeout=1.0):
                data = os.read(key.fd, 1 << 20)
                if key.fd != requests:
                    self._hear(self._children[key.fd], data)
                elif not data:
                    return
                else:
                    unpacker.feed(data)
                    self._waiting.extend(unpacker)
            for child in list(self._children.values()):
                if time.monotonic() > child.deadline:
                    os.kill(child.pid, signal.SIGKILL)

    def _start(self, job: Any) -> None:
        output, child_output = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(output)
            self._do(job, child_output, parent)
        os.close(child_output)
        self._children[output] = _Child(job, pid, output, time.monotonic() + self._limits.wall_seconds)
        self._selector.register(output, selectors.EVENT_READ)

    def _do(self, job: Any, output: int, parent: int) -> None:
        """Runs in the child; does not return."""
        try:
            signal.setitimer(signal.ITIMER_PROF, self._limits.cpu_seconds)  # its signal ends the child
            end_with_parent(signal.SIGKILL)  # else it would write into shared memory that has no owner
            if os.getppid() != parent:
                os._exit(FAILED)  # the parent ended before the kernel knew of the wish
            limit_memory(self._limits.memory_bytes)
            os.nice(self._limits.niceness)
            result = self._work(job)
            with os.fdopen(output, "wb") as stream:
                stream.write(msgpack.packb(result))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(FAILED)  # after any exception: a child must not continue the parent's loop

    def _hear(self, child: _Child, data: bytes) -> None:
        if data:
            child.words += data
            return
        self._selector.unregister(child.output)
        os.close(child.output)
        del self._children[child.output]
        _, status = os.waitpid(child.pid, 0)
        result = msgpack.unpackb(child.words) if status == 0 else None
        self._answer(child.job, result, os.waitstatus_to_exitcode(status))
