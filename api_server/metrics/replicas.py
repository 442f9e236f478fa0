"""The live figures of all API processes of a server, for the one that is asked.

Each process writes its own into a small file in the run directory, within a second of a change, and reads the others'
when it is asked. So no process asks another one, and an idle server writes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

log = logging.getLogger("tokenyard")

# Seconds from a change to its place in the file.
WRITE_SECONDS = 1.0


class ReplicaFiles:
    """The files of one server; without a folder, a process knows itself alone."""

    def __init__(self, folder: Path | None, own: Callable[[], dict[str, Any]]) -> None:
        self._folder = folder
        self._own = own
        self._name = f"{os.getpid()}.json"
        self._due = False
        self.write()

    def changed(self) -> None:
        """Has the file written soon. To be called in the event loop."""
        if self._folder is not None and not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(WRITE_SECONDS, self.write)

    def write(self) -> None:
        """Replaces this process's file. Where it cannot be written, others do not see this process."""
        self._due = False
        if self._folder is None:
            return
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            draft = self._folder / f"{self._name}.new"
            draft.write_bytes(orjson.dumps(self._own()))
            os.replace(draft, self._folder / self._name)
        except OSError as error:
            log.debug("live figures were not written: %s", error)

    def all(self) -> list[dict[str, Any]]:
        """The figures of this process, as they are now, and those that the others have written."""
        others = self._others() if self._folder is not None else []
        return sorted([self._own(), *others], key=lambda figures: str(figures["replica"]))

    def _others(self) -> list[dict[str, Any]]:
        paths = [path for path in _entries(self._folder) if path.suffix == ".json" and path.name != self._name]
        return [figures for path in paths if _lives(path) and (figures := _read(path))]


def _entries(folder: Path | None) -> list[Path]:
    try:
        return [] if folder is None else list(folder.iterdir())
    except OSError:
        return []


def _lives(path: Path) -> bool:
    """True while the process that writes this file lives; the file of a dead one is removed."""
    try:
        os.kill(int(path.stem), 0)
    except (ProcessLookupError, ValueError):
        path.unlink(missing_ok=True)
        return False
    except PermissionError:
        return True
    return True


def _read(path: Path) -> dict[str, Any] | None:
    try:
        figures: dict[str, Any] = orjson.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return figures if "replica" in figures else None
