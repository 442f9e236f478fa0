"""How a child process tells its supervisor what it is doing while it starts, and then that it lives: one JSON line per
event on an inherited pipe.

The pipe's file descriptor comes in TOKENYARD_STATUS_FD; without it (a process started by hand) the events are dropped.
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
    """Tells the supervisor; never fails and never blocks start-up when nobody reads."""
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
    """A start-up phase begins (import, load weights, allocate KV, compile kernels); the one before it is over."""
    report("phase", name=name)


def progress(done: int, total: int, unit: str) -> None:
    """Progress within the current phase."""
    report("progress", done=done, total=total, unit=unit)


def ready(**details: Any) -> None:
    """This process serves from now on; `details` are facts for the start-up summary."""
    report("ready", **details)


def beat() -> None:
    """This process lives, and does what it is for. To be called in its loop, as often as it likes."""
    global _last_beat
    now = time.monotonic()
    if now - _last_beat >= BEAT_SECONDS:
        _last_beat = now
        report("beat", pid=os.getpid())


def died(pid: int, status: int) -> None:
    """The fork that this process had work has ended, and it can fork another one (shared/forkserver.py).

    `status` as subprocess says it: the exit code, or the signal's number below zero.
    """
    report("died", pid=pid, status=status)


def fatal(message: str, may_pass: bool = False) -> None:
    """This process cannot work; it says why and ends.

    A setting (or the model it names) is at fault, so that a restart would not help and the supervisor gives up; or, if
    it `may_pass`, the machine or the network is, and the supervisor tries again as after any death.
    """
    report("fatal", message=message, may_pass=may_pass)
