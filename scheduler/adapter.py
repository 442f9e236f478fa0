"""An adapter as the scheduler has it, and the file that keeps adapters while the scheduler is restarted.

An adapter's identity is its content. A file that was changed and loaded again is another adapter with another handle.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from interfaces import AdapterState
from shared.endpoints import UPLOADS

log = logging.getLogger(__name__)

# Only this server's user may read the file: paths are an operator's matter.
_FILE_MODE = 0o600


@dataclass(eq=False, slots=True)
class Adapter:
    """One version of an adapter: what its files contained when it was loaded.

    `size` is its memory on a worker in bytes; before the first worker has loaded it, an estimate.
    """

    handle: int
    name: str
    path: str
    size: int = 0
    pinned: bool = False
    digest: str = ""
    rank: int = 0
    state: int = AdapterState.LOADING
    # Workers that died while they loaded it.
    crashes: int = 0

    def __str__(self) -> str:
        return f"adapter {self.name!r} (handle {self.handle}, content {self.digest[:12] or 'unknown'})"


class AdapterFile:
    """The file of the adapters that were loaded. It outlives the scheduler, not the server."""

    def __init__(self, path: Path | None) -> None:
        """None: nothing is kept."""
        self._path = path

    def read(self) -> list[Adapter] | None:
        """Return the adapters that an earlier scheduler of this server had; None: there was none, or no whole file."""
        if self._path is None:
            return None
        try:
            entries = json.loads(self._path.read_text())
            return [_adapter(entry) for entry in entries]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.error("adapters are forgotten, because %s cannot be read: %s", self._path, error)
            return None

    def discard(self, path: str) -> None:
        """Remove the files of an adapter that came over HTTP. Other files are an operator's, and stay."""
        if self._path is not None and Path(path).resolve().parent == (self._path.parent / UPLOADS).resolve():
            shutil.rmtree(path, ignore_errors=True)

    def write(self, adapters: Collection[Adapter]) -> None:
        """Keep these adapters. A reader finds the old file or the new one, never a part."""
        if self._path is None:
            return
        text = json.dumps([asdict(adapter) for adapter in adapters])
        unnamed = self._path.with_suffix(".new")
        try:
            descriptor = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _FILE_MODE)
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            unnamed.replace(self._path)
        except OSError as error:
            log.error("adapters would be forgotten with this process: %s cannot be written: %s", self._path, error)


def size_of(path: str) -> int:
    """Estimate the memory of an adapter in bytes by its files; 0 where there are none that can be seen from here."""
    try:
        return sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    except OSError:
        return 0


def _adapter(entry: dict[str, Any]) -> Adapter:
    adapter = Adapter(**entry)
    kinds = {"handle": int, "name": str, "path": str, "size": int, "pinned": bool, "digest": str, "rank": int}
    for name, kind in kinds.items():
        if type(getattr(adapter, name)) is not kind:
            raise ValueError(f"{name} must be {kind.__name__}, got {getattr(adapter, name)!r}")
    if adapter.state not in (AdapterState.READY, AdapterState.LEAVING):
        raise ValueError(f"state must be READY or LEAVING, got {adapter.state!r}")
    adapter.crashes = 0
    return adapter
