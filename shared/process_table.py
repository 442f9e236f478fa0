"""Which processes of a server are silent, and how often each hung: a small file that the supervisor writes, and that
`/metrics` and `tokenyard status` read.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass
class ProcessState:
    """The state of one process. `silent_since` is on the machine-wide clock of `time.monotonic`; None: it is not
    silent."""

    silent_since: float | None = None
    hangs: int = 0

    @property
    def seconds_silent(self) -> float:
        return 0.0 if self.silent_since is None else max(0.0, time.monotonic() - self.silent_since)


def write(file: Path, states: dict[str, ProcessState]) -> None:
    """Replace the table atomically. OSError when it cannot be written."""
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps({name: asdict(state) for name, state in states.items()}))
    os.replace(fresh, file)


def read(file: Path) -> dict[str, ProcessState]:
    """Read the table, keyed by the supervisor's names; empty when there is none."""
    try:
        return {name: ProcessState(**state) for name, state in json.loads(file.read_text()).items()}
    except (OSError, ValueError, TypeError):
        return {}
