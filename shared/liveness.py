"""The life of a child process: tied to the supervisor that started it, named for `ps`, bounded in memory."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import resource
import signal
import sys
from pathlib import Path

import setproctitle

_PR_SET_PDEATHSIG = 1
_SYS_PIDFD_OPEN = 434
_FRAME = re.compile(r'  (File ".*", line \d+ in .*)')

# Environment variable by which a supervisor names itself; absent for a process that was started by hand.
SUPERVISOR_PID = "TOKENYARD_SUPERVISOR_PID"

# Python takes any -X option and ignores what it does not know.
_ROLE_OPTION = "tokenyard="
# A title grows by that many when the epoch in it gets more digits.
_ROOM_FOR_EPOCHS = 4


def role_option(role: str) -> list[str]:
    """Options for Python that name the role before the process has its title, and leave room for that title."""
    return ["-X", _ROLE_OPTION + role]


def become(role: str, stack_file: Path | None = None) -> None:
    """Take the title `tokenyard: ROLE`, keeping the module's name visible, and die with the supervisor.

    The kernel sends SIGTERM when the parent ends for whatever reason (prctl(2), PR_SET_PDEATHSIG), so that a killed
    supervisor leaves no orphans. SIGUSR1 prints every thread's stack, for a process that seems stuck; SIGUSR2 writes
    them to `stack_file`. Inherited descriptors go to none of this process's own children.
    """
    _take_title(role)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if stack_file is not None:
        with contextlib.suppress(OSError):  # a full file system costs the stack, and no process
            faulthandler.register(signal.SIGUSR2, file=stack_file.open("w"), all_threads=True)
    end_with_parent(signal.SIGTERM)
    _keep_descriptors()
    if orphaned():
        sys.exit("the supervisor ended before this process had started")


def _take_title(role: str) -> None:
    arguments = sys.orig_argv[1:]
    if arguments[0] == "-X" and arguments[1].startswith(_ROLE_OPTION):
        arguments = arguments[2:]
    title = f"tokenyard: {role} [{' '.join(arguments)}]"
    # A title that does not fit the command line's place takes that of the environment, too, which is then unreadable.
    fits = len(os.fsencode(title)) + _ROOM_FOR_EPOCHS <= len(os.fsencode(" ".join(sys.orig_argv)))
    if fits:
        os.environ["SPT_NOENV"] = "1"
    setproctitle.setproctitle(title)
    os.environ.pop("SPT_NOENV", None)  # it was read at the first title; our own children may need more room


def _keep_descriptors() -> None:
    """Make inherited descriptors non-inheritable.

    A listening socket is closed only when every process has closed it, and a pipe ends only then. subprocess closes
    what it is not asked to pass on; uvloop's subprocesses get all that is inheritable.
    """
    with contextlib.suppress(OSError):  # a system without /dev/fd
        for descriptor in map(int, os.listdir("/dev/fd")):
            if descriptor > 2:
                with contextlib.suppress(OSError):  # that of the listing itself
                    os.set_inheritable(descriptor, False)


def limit_memory(more: int) -> None:
    """Limit this process and its children to `more` bytes beyond what it has now, and to no core file."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process the signal when the thread that made it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def open_pidfd(pid: int) -> int:
    """Open a descriptor that becomes readable when the process ends. OSError when there is no such process.

    Some Python builds (conda's) were made with headers too old for os.pidfd_open although the kernel has the call; its
    number is the same on every architecture.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    descriptor = int(ctypes.CDLL(None, use_errno=True).syscall(_SYS_PIDFD_OPEN, pid, 0))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "pidfd_open failed; Linux 5.3 or newer is needed")
    return descriptor


def nudge(pid: int, group: int, has_stack_file: bool) -> None:
    """Continue a process that seems stuck if it was stopped, and have it write its stack file if it has one.

    Nothing happens when the process is not of that group: its id has become another's.
    """
    for number in (signal.SIGUSR2, signal.SIGCONT) if has_stack_file else (signal.SIGCONT,):
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == group:
                os.kill(pid, number)


def orphaned() -> bool:
    """Whether the supervisor that started this process has ended."""
    return os.environ.get(SUPERVISOR_PID, str(os.getppid())) != str(os.getppid())


def last_frame(stack_file: Path) -> str:
    """Return the innermost Python frame that the last SIGUSR2 wrote to the stack file; empty when there is none."""
    try:
        dump = stack_file.read_text(errors="replace")
    except OSError:
        return ""
    found = _FRAME.search(dump, max(0, dump.rfind("Current thread")))
    return found[1] if found else ""
