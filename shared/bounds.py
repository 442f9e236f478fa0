"""Bounds that a process sets to itself before it does what somebody else asked for."""

from __future__ import annotations

import resource
from pathlib import Path


def limit_memory(more: int) -> None:
    """This process, and what it starts, may take so many bytes beyond what it has, and leaves no core file."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
