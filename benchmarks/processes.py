"""CPU time of the server's processes by role: the supervisor's children, told apart by the module in the command line.

Knows processes of this machine. Without a supervisor's pid (a server elsewhere) there is nothing to measure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

ROLES = ("api_server", "scheduler", "model_worker")


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds since their start of the processes alive at one moment, by role and pid."""

    by_role: dict[str, dict[int, float]]

    @classmethod
    def of(cls, supervisor: int) -> CpuTimes:
        by_role: dict[str, dict[int, float]] = defaultdict(dict)
        try:
            children = psutil.Process(supervisor).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        for child in children:
            try:
                role, times = role_of(child.cmdline()), child.cpu_times()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            if role:
                by_role[role][child.pid] = times.user + times.system
        return cls(dict(by_role))

    def since(self, earlier: CpuTimes) -> dict[str, float]:
        """Seconds used from `earlier` to now; a lower bound if a process ended in between: its time is gone with it."""
        return {
            role: sum(used - earlier.by_role.get(role, {}).get(pid, 0.0) for pid, used in processes.items())
            for role, processes in self.by_role.items()
        }


def role_of(command_line: Sequence[str]) -> str | None:
    """The role whose module is named first: later arguments may name other processes' sockets."""
    text = " ".join(command_line)
    named = {role: text.find(role) for role in ROLES if role in text}
    return min(named, key=lambda role: named[role]) if named else None


def per_thousand_tokens(seconds: dict[str, float], output_tokens: int) -> dict[str, float]:
    return {role: 1000 * used / output_tokens for role, used in seconds.items()} if output_tokens else {}
