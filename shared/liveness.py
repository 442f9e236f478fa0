"""Ties a child process to the supervisor that started it, and names it for `ps`."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys

import setproctitle

_PR_SET_PDEATHSIG = 1

SUPERVISOR_PID = "TOKENYARD_SUPERVISOR_PID"
"""Environment variable by which a supervisor names itself; absent for a process that was started by hand."""


def become(role: str) -> None:
    """Takes the title `tokenyard: ROLE`, keeping the module's name visible, and dies with the supervisor.

    The kernel sends SIGTERM when the parent ends for whatever reason (prctl(2), PR_SET_PDEATHSIG), so that a killed
    supervisor leaves no orphans. SIGUSR1 prints every thread's stack, for a process that seems stuck.
    """
    setproctitle.setproctitle(f"tokenyard: {role} [{' '.join(sys.orig_argv[1:])}]")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.environ.get(SUPERVISOR_PID, str(os.getppid())) != str(os.getppid()):
        sys.exit("the supervisor ended before this process had started")
