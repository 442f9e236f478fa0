"""A process that has loaded what takes long, and forks others from itself in milliseconds: both of its sides.

The worker holds a `Nursery`; the process itself runs `nurse`. Its standard input is a socket to the worker, on which
come descriptors for a child to serve on, and go the children's exit codes. One child lives at a time. Knows processes;
knows nothing of what the children do.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from shared.liveness import SUPERVISOR_PID, end_with_parent

MOST_DESCRIPTORS = 8
_EXIT_CODE = struct.Struct("i")


class Nursery:
    """The worker's side. `command` is what a fresh interpreter runs, and ends up in `nurse`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = [sys.executable, *command]
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._alive = 0
        """Children that were asked for and whose end was not heard of; they end in the order of their beginning."""

    def start(self) -> None:
        """Begins to load, unless that was done; a process that has died is followed by another."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            environment = {**os.environ, SUPERVISOR_PID: str(os.getpid())}
            self._process = subprocess.Popen(self._command, stdin=theirs.fileno(), env=environment)

    def fork(self, descriptors: Sequence[int]) -> None:
        """Asks for a child that serves on copies of these. If that fails, they are closed as if the child had died."""
        self.start()
        assert self._line is not None
        self._alive += 1
        with contextlib.suppress(OSError):
            socket.send_fds(self._line, [b"\0"], descriptors)

    def exit_code(self, seconds: float) -> int:
        """How the last child ended, as subprocess says it; 0 if that is not known in time.

        The end of the whole process kills its child, however that end came about: no child is to blame for it.
        """
        assert self._line is not None
        assert self._process is not None
        deadline, code = time.monotonic() + seconds, 0
        while self._alive:
            readable, _, _ = select.select([self._line], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                return 0
            data = b""
            with contextlib.suppress(ConnectionResetError):  # it died with a request unread
                data = self._line.recv(_EXIT_CODE.size)
            if not data:
                self._process.wait()  # or `start` would take it for alive
                return -signal.SIGKILL
            [code] = _EXIT_CODE.unpack(data)
            self._alive -= 1
        return code

    def close(self) -> None:
        """Ends the process, and with it its child."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._line is not None:
            self._line.close()
        self._process = self._line = None
        self._alive = 0


def nurse(serve: Callable[[list[int]], None]) -> None:
    """The process's side: for each set of descriptors a child runs `serve`, until the worker closes its end."""
    # What is there by now belongs to all children: no collector may write to it.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as line:
        while True:
            data, descriptors, _, _ = socket.recv_fds(line, 1, MOST_DESCRIPTORS)
            if not data:
                return
            child = os.fork()
            if child == 0:
                line.close()
                _be_child(serve, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            _, status = os.waitpid(child, 0)
            with contextlib.suppress(OSError):  # a worker that has gone is noticed above
                line.send(_EXIT_CODE.pack(os.waitstatus_to_exitcode(status)))


def _be_child(serve: Callable[[list[int]], None], descriptors: list[int]) -> None:
    """Does not return, and leaves by no other way: what comes after it is the parent's."""
    code = 1
    try:
        os.close(sys.stdin.fileno())
        end_with_parent(signal.SIGKILL)
        serve(descriptors)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)
