"""A fork server: a process that has imported everything slow, and whose forks do its work, one after the other.

A worker that dies is followed by one that has imported already. The supervisor starts the fork server with FORKS in its
environment and a pipe as its standard input. When it has imported, `successor` forks. If a fork dies after it has
served, and without SIGTERM, the fork server reports it (`phases.died`) and waits for an epoch on its standard input,
which is that of the next fork. In every other case it ends as its fork has ended: a fresh process may fare better where
a fork could not even start.

Knows processes. Does not know what the forks do, nor when one should be started.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import setproctitle

from shared import phases
from shared.liveness import SUPERVISOR_PID

# Environment variable of a fork server: its parent will write the epoch of each next fork to its standard input.
FORKS = "TOKENYARD_FORKS"

# One byte that forks share with the process they come from: whether a fork has served.
_served: mmap.mmap | None = None


def successor(epoch: int) -> int:
    """Return in a fork of this process, with the fork's epoch; in this process itself if FORKS is not set.

    With FORKS, the epoch must be the command line's last argument, and no thread may run that a fork would miss. A fork
    must `become` its role anew (shared/liveness.py).
    """
    global _served
    if os.environ.pop(FORKS, None) is None:
        return epoch
    _served = mmap.mmap(-1, 1)
    title = setproctitle.getproctitle()
    own_pid = os.getpid()
    while True:
        _served[0] = 0
        child = os.fork()
        if child == 0:
            _leave(own_pid, epoch)
            return epoch
        # No command line in the title: a search for the working process must find the fork.
        setproctitle.setproctitle(f"{title.partition(' [')[0]}, for successors")
        code, terminated = _end_of(child)
        if terminated or not _served[0]:
            _end_as(code)
        _end_what_it_started(own_pid)
        phases.died(child, code)
        order = os.read(sys.stdin.fileno(), 32)
        if not order:  # the supervisor has gone
            _end_as(0)
        epoch = int(order)


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


def _end_as(code: int) -> None:
    """End as the fork has ended: by its signal or with its exit code. Does not return."""
    if code < 0:
        faulthandler.disable()  # the fork has printed its stack
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)
