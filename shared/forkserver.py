"""A process that has imported what takes seconds stays as it is, and forks do its work, one after the other.

So a worker that died is followed by one that has imported already. The supervisor starts such a process with FORKS in
its environment and a pipe as its standard input. When it has imported, `successor` forks. If a fork dies after it had
served, and without being told to end, the process tells the supervisor (`phases.died`) and waits for an epoch on its
standard input, which is that of the next fork. In every other case it ends as its fork has ended: a fresh process may
fare better where one could not even start.

Knows processes. Knows nothing of what the forks do, nor when one should be started.
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

FORKS = "TOKENYARD_FORKS"
"""Environment variable: whoever started this process will tell it on standard input when to fork again."""

_served: mmap.mmap | None = None
"""One byte that forks share with the process they come from."""


def successor(epoch: int) -> int:
    """Returns in a fork of this process, whose epoch it gives; in this process itself if nobody wants forks.

    Where there are forks the epoch must be the command line's last argument, and no thread may be one they would miss.
    A fork must `become` its role anew (shared/liveness.py).
    """
    global _served
    if os.environ.pop(FORKS, None) is None:
        return epoch
    _served, title, own_pid = mmap.mmap(-1, 1), setproctitle.getproctitle(), os.getpid()
    while True:
        _served[0] = 0
        child = os.fork()
        if child == 0:
            _leave(own_pid, epoch)
            return epoch
        # No command line in it: whoever looks for the one that works must find the fork.
        setproctitle.setproctitle(f"{title.partition(' [')[0]}, for successors")
        code, told = _end_of(child)
        if told or not _served[0]:
            _end_as(code)
        _end_what_it_started(own_pid)
        phases.died(child, code)
        order = os.read(sys.stdin.fileno(), 32)
        if not order:  # the supervisor has gone
            _end_as(0)
        epoch = int(order)


def has_served() -> None:
    """From now on the end of this fork is worth a successor."""
    if _served is not None:
        _served[0] = 1


def _leave(parent: int, epoch: int) -> None:
    os.environ[SUPERVISOR_PID] = str(parent)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    sys.orig_argv[-1] = str(epoch)


def _end_of(child: int) -> tuple[int, bool]:
    """How it ended, as subprocess says it, and whether it was told to: SIGTERM is passed on to it."""
    told = False

    def pass_on(number: int, _: Any) -> None:
        nonlocal told
        told = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    signal.signal(signal.SIGTERM, pass_on)
    _, status = os.waitpid(child, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return os.waitstatus_to_exitcode(status), told


def _end_what_it_started(group: int) -> None:
    """Forks stay in the group that their parent leads, so that whoever kills it ends them all."""
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
            if pid != group and os.getpgid(pid) == group:
                os.kill(pid, signal.SIGKILL)


def _end_as(code: int) -> None:
    """Does not return."""
    if code < 0:
        faulthandler.disable()  # the fork has told where it was
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)
