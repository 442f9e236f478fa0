"""Startup events: a child process reports to its supervisor what it is doing while it starts, and then that it lives.

Each event is one JSON line on an inherited pipe, whose file descriptor comes in TOKENYARD_STATUS_FD. Without it (a
process started by hand) the events are dropped.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

STATUS_FD = "TOKENYARD_STATUS_FD"
BEAT_SECONDS = 2.0

_last_beat = float("-inf")


def report(event: str, **details: Any) -> None:
    """Send an event to the supervisor. Never fails, and never blocks start-up when nothing reads the pipe."""
    descriptor = os.environ.get(STATUS_FD)
    if descriptor is None:
        return
    try:
        os.write(int(descriptor), json.dumps({"event": event, **details}).encode() + b"\n")
    except BlockingIOError:
        return  # the supervisor does not read, and what it missed it need not know
    except (OSError, ValueError):
        os.environ.pop(STATUS_FD, None)


def phase(name: str) -> None:
    """Begin a start-up phase (import, load weights, allocate KV, compile kernels); the one before it is over."""
    report("phase", name=name)


def progress(done: int, total: int, unit: str) -> None:
    """Report progress within the current phase."""
    report("progress", done=done, total=total, unit=unit)


def tensors(_: str, done: int, total: int) -> None:
    """Report how many tensors are done. The first argument, what is done with them, is for other observers."""
    progress(done, total, "tensors")


def ready(**details: Any) -> None:
    """Report that this process serves from now on; `details` are facts for the start-up summary."""
    report("ready", **details)


def beat() -> None:
    """Report that this process lives and works. Call it in its loop, as often as you like."""
    global _last_beat
    now = time.monotonic()
    if now - _last_beat >= BEAT_SECONDS:
        _last_beat = now
        report("beat", pid=os.getpid())


def leave(reason: str) -> None:
    """Report that this process ends in order, and that another one should follow it at once."""
    report("leave", reason=reason)


def missed(reason: str) -> None:
    """Report that this process ends because others did not come to a meeting, and should be started again later."""
    report("missed", reason=reason)


def died(pid: int, status: int) -> None:
    """Report that the working fork has ended, and that this process can fork another one (shared/forkserver.py).

    `status` is as in subprocess: the exit code, or the signal's number below zero.
    """
    report("died", pid=pid, status=status)


def fatal(message: str, may_pass: bool = False) -> None:
    """Report why this process cannot work, and end.

    By default a setting (or the model it names) is at fault: a restart would not help, and the supervisor gives up.
    With `may_pass` the machine or the network is at fault, and the supervisor tries again as after any death.
    """
    report("fatal", message=message, may_pass=may_pass)
