"""Deaths of child processes at the worst moment."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence

import psutil


def kill_unseen(pid: int) -> None:
    """Kill a child, and return when it is gone: before this thread's event loop can see it, so a pipe breaks first."""
    os.kill(pid, signal.SIGKILL)
    # A thread of asyncio may have waited for it already.
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def kill_together(processes: Sequence[psutil.Process]) -> None:
    """Kill processes as the loss of their machine does: the first, a supervisor, sees no other one's end.

    Some may end by the death of others.
    """
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, 60)
