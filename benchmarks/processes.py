"""CPU time of a server's processes by role, which the module in the command line names; and their standing still.

Knows processes of this machine, as the tree below one of them: the supervisor, or whatever started a peer. Without its
pid (a server elsewhere) there is nothing to measure.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

WORKER = "model_worker"
ROLES = ("api_server", "scheduler", WORKER)
OTHER = "other"
"""The supervisor itself, and every process of a server that has no such roles."""


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds since their start of the processes alive at one moment, by role and pid."""

    by_role: dict[str, dict[int, float]]

    @classmethod
    def of(cls, supervisor: int) -> CpuTimes:
        by_role: dict[str, dict[int, float]] = defaultdict(dict)
        for process in tree(supervisor):
            try:
                role, times = role_of(process.cmdline()), process.cpu_times()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            # The supervisor's own command line may name anything: a model's folder, say.
            by_role[OTHER if role is None or process.pid == supervisor else role][process.pid] = (
                times.user + times.system
            )
        return cls(dict(by_role))

    def since(self, earlier: CpuTimes) -> dict[str, float]:
        """Seconds used from `earlier` to now; a lower bound if a process ended in between: its time is gone with it."""
        return {
            role: sum(used - earlier.by_role.get(role, {}).get(pid, 0.0) for pid, used in processes.items())
            for role, processes in self.by_role.items()
        }


def tree(root: int) -> list[psutil.Process]:
    """The process and all below it, parents first; empty when it is gone."""
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def peak_memory(root: int) -> int:
    """Return the most bytes that one process of the tree has had in memory, its share of mapped files included."""
    peaks = [0]
    for process in tree(root):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
            peaks += [int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")]
    return max(peaks)


def freeze(root: int) -> None:
    """Stops the tree (SIGSTOP), parents first: none can answer its children's standstill by starting new ones."""
    for process in tree(root):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()


def thaw(root: int) -> None:
    for process in reversed(tree(root)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def role_of(command_line: Sequence[str]) -> str | None:
    """The role whose module is named first: later arguments may name other processes' sockets."""
    text = " ".join(command_line)
    named = {role: text.find(role) for role in ROLES if role in text}
    return min(named, key=lambda role: named[role]) if named else None


def per_thousand_tokens(seconds: dict[str, float], output_tokens: int) -> dict[str, float]:
    return {role: 1000 * used / output_tokens for role, used in seconds.items()} if output_tokens else {}
