"""Fork servers: processes that have loaded what takes long, and whose forks do the work, one after the other.

There are two kinds, with one loop. The supervisor's starts as any child, with FORKS in its environment and a pipe as
its standard input. When it has imported, `successor` forks. If a fork ends after it has served, and without SIGTERM,
the server reports it (`phases.died`) and waits for an epoch on its standard input, which is that of the next fork. In
every other case it ends as its fork has ended: a fresh process may fare better where a fork could not even start.

A worker's own is started by a `ForkServer` and runs `serve_forks`. Its standard input is a socket, on which come the
descriptors that a fork serves on, and go the exit codes.

Knows processes. Does not know what the forks do.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import mmap
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import setproctitle

from shared import phases
from shared.liveness import SUPERVISOR_PID, end_with_parent

# Environment variable of a supervisor's fork server: the epoch of each next fork comes on its standard input.
FORKS = "TOKENYARD_FORKS"

_MAX_DESCRIPTORS = 8
_EXIT_CODE = struct.Struct("i")

Order = TypeVar("Order")

# One byte that forks share with the process they come from: whether a fork has served.
_served: mmap.mmap | None = None


def _fork_for_each(orders: Iterator[Order], watch: Callable[[int, Order], None]) -> Order:
    """Fork for each order. Returns in the forks, with the order of each.

    `watch` gets each fork's id, and returns when that has ended. After the last order this process ends.
    """
    for order in orders:
        child = os.fork()
        if child == 0:
            return order
        watch(child, order)
    raise SystemExit(0)


class ForkServer:
    """The worker's side of a fork server, which runs `command` in a fresh interpreter."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = [sys.executable, *command]
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        # Forks that were asked for, and whose end is not known; they end in the order in which they began.
        self._alive = 0

    def start(self) -> None:
        """Begin to load, unless that was done. A process that has died is followed by another."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            environment = {**os.environ, SUPERVISOR_PID: str(os.getpid())}
            self._process = subprocess.Popen(self._command, stdin=theirs.fileno(), env=environment)

    def fork(self, descriptors: Sequence[int]) -> None:
        """Ask for a fork that serves on copies of these. If that fails, they are closed as if the fork had died."""
        self.start()
        assert self._line is not None
        self._alive += 1
        with contextlib.suppress(OSError):
            socket.send_fds(self._line, [b"\0"], descriptors)

    def exit_code(self, seconds: float) -> int:
        """Return the exit code of the last fork, as subprocess has it; 0 if it is not known in time.

        The end of the whole process kills its fork, whatever the cause: no fork is to blame for it.
        """
        assert self._line is not None
        assert self._process is not None
        deadline = time.monotonic() + seconds
        code = 0
        while self._alive:
            readable, _, _ = select.select([self._line], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                return 0
            data = b""
            with contextlib.suppress(ConnectionResetError):  # it died with a request unread
                data = self._line.recv(_EXIT_CODE.size)
            if not data:
                self._process.wait()  # or `start` would find it alive
                return -signal.SIGKILL
            [code] = _EXIT_CODE.unpack(data)
            self._alive -= 1
        return code

    def close(self) -> None:
        """End the process, and with it its fork."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._line is not None:
            self._line.close()
        self._process = None
        self._line = None
        self._alive = 0


def serve_forks(serve: Callable[[list[int]], None]) -> NoReturn:
    """Run `serve` in a fork for each set of descriptors, until the worker closes its end."""
    # What is there by now belongs to all forks, so no collector may write to it.
    gc.collect()
    gc.freeze()
    line = socket.socket(fileno=os.dup(sys.stdin.fileno()))

    def sets_of_descriptors() -> Iterator[list[int]]:
        while True:
            data, descriptors, _, _ = socket.recv_fds(line, 1, _MAX_DESCRIPTORS)
            if not data:
                return
            yield descriptors

    def watch(child: int, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(OSError):  # the next order shows that the worker has gone
            line.send(_EXIT_CODE.pack(os.waitstatus_to_exitcode(status)))

    descriptors = _fork_for_each(sets_of_descriptors(), watch)
    code = 1
    try:
        line.close()
        os.close(sys.stdin.fileno())
        end_with_parent(signal.SIGKILL)
        serve(descriptors)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # Everything after this call is the server's.
        os._exit(code)


def successor(epoch: int) -> int:
    """Return in a fork of this process, with the fork's epoch; in this process itself if FORKS is not set.

    With FORKS, the epoch must be the command line's last argument, and no thread may run that a fork would miss. A fork
    must `become` its role anew (shared/liveness.py).
    """
    global _served
    if os.environ.pop(FORKS, None) is None:
        return epoch
    _served = served = mmap.mmap(-1, 1)
    title = setproctitle.getproctitle()
    own_pid = os.getpid()

    def epochs() -> Iterator[int]:
        order = str(epoch).encode()
        while order:  # else the supervisor has gone
            served[0] = 0
            yield int(order)
            order = os.read(sys.stdin.fileno(), 32)

    def watch(child: int, _: int) -> None:
        # No command line in the title: a search for the working process must find the fork.
        setproctitle.setproctitle(f"{title.partition(' [')[0]}, for successors")
        code, terminated = _end_of(child)
        if terminated or not served[0]:
            _end_as(code)
        _end_what_it_started(own_pid)
        phases.died(child, code)

    epoch = _fork_for_each(epochs(), watch)
    _leave(own_pid, epoch)
    return epoch


def has_served() -> None:
    """Record that this fork has served, so that it gets a successor when it dies."""
    if _served is not None:
        _served[0] = 1


def _leave(parent: int, epoch: int) -> None:
    os.environ[SUPERVISOR_PID] = str(parent)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    sys.orig_argv[-1] = str(epoch)


def _end_of(child: int) -> tuple[int, bool]:
    """Wait for the fork. Returns its status as subprocess reports it, and whether SIGTERM came, which is passed on."""
    terminated = False

    def pass_on(number: int, _: Any) -> None:
        nonlocal terminated
        terminated = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    signal.signal(signal.SIGTERM, pass_on)
    _, status = os.waitpid(child, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return os.waitstatus_to_exitcode(status), terminated


def _end_what_it_started(group: int) -> None:
    """Kill the processes of a dead fork. Forks stay in their parent's group, so that one signal to the group ends
    them all."""
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if pid != group and os.getpgid(pid) == group:
                os.kill(pid, signal.SIGKILL)


def _end_as(code: int) -> NoReturn:
    """End as the fork has ended: by its signal or with its exit code."""
    if code < 0:
        faulthandler.disable()  # the fork has printed its stack
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)
