"""The files in which API processes share their figures, and the fallback when there is no room for them.

prometheus_client maps a file per process and kind of figure. A page of a mapped file for which the file system has no
room ends the process that touches it, so room is reserved before the first figure is made. Knows the names of these
files and how the library chooses where values live; does not know the figures.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from prometheus_client import values

log = logging.getLogger("tokenyard")

# Bytes by kind. The library would enlarge a full file without reserving anything; a test shows that these do not get
# full, whatever labels there are.
FILES = {"counter": 1 << 18, "histogram": 1 << 17}


def shared_directory() -> str | None:
    """The directory of this process's shared figures, with room reserved; None when figures are not shared.

    Figures that exist by then stay where they are.
    """
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if directory is None:
        return None
    paths = {Path(directory, f"{kind}_{os.getpid()}.db"): size for kind, size in FILES.items()}
    try:
        for path, size in paths.items():
            _reserve(path, size)
    except OSError as error:
        for path in paths:
            path.unlink(missing_ok=True)
        log.warning(
            "%s takes no metrics (%s): /metrics shows what this process alone has done", directory, error.strerror
        )
        values.ValueClass = values.MutexValue
        return None
    return directory


def _reserve(path: Path, size: int) -> None:
    with path.open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, size)
