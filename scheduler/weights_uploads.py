"""Files of tensors that were sent to the server: which are held for the next order, and which are removed.

Knows paths and names of tensors. Does not know workers, nor orders.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Collection, Iterable

from scheduler.weights_change import needed
from shared.weights_file import Overlay, Served, WeightsFile

# Begins the names of files that come over a group. Those of API replicas have other names.
_RECEIVED = "received-"


class WeightsUploads:
    """The uploads of a run directory, as one scheduler sees them."""

    def __init__(self, file: WeightsFile, incarnation: int, served: Served) -> None:
        self.held: list[Overlay] = []
        self._file = file
        self._prefix = f"{_RECEIVED}{incarnation}-"
        self._numbers = itertools.count(1)
        # The orders of the scheduler before this one are answered with an error.
        self._remove_all(served, "")

    def new_path(self) -> str:
        """Return where the tensors of the next message over a group are written; empty if there is no place."""
        folder = self._file.uploads
        return "" if folder is None else str(folder / f"{self._prefix}{next(self._numbers)}.safetensors")

    def hold(self, received: Iterable[Overlay]) -> str:
        """Keep files for the next order, but those that later ones replace. Returns why they cannot be kept."""
        held = needed([*self.held, *received])
        size = sum(overlay.size for overlay in held)
        folder = self._file.uploads
        if folder is not None and folder.is_dir() and size > (free := shutil.disk_usage(folder).free):
            return (
                f"the tensors that are held would take {size} bytes, and {free} are left in {folder}: update with "
                "those that are held, or from a folder, first"
            )
        self.discard([overlay.path for overlay in self.held], [overlay.path for overlay in held])
        self.held = held
        return ""

    def take(self) -> list[Overlay]:
        """Return what was held: it is the caller's now."""
        held = self.held
        self.held = []
        return held

    def discard(self, paths: Iterable[str], kept: Collection[str] = ()) -> None:
        """Remove files, but not those that are `kept`. Files that were not sent here stay."""
        self._file.discard(set(paths) - set(kept))

    def remove_strays(self, served: Served) -> None:
        """Remove what a worker has received for an order of another scheduler."""
        self._remove_all(served, _RECEIVED)

    def _remove_all(self, served: Served, beginning: str) -> None:
        """Remove the files whose names have this beginning, but not this scheduler's, and not those that are served."""
        folder = self._file.uploads
        if folder is None or not folder.is_dir():
            return
        found = [str(path) for path in folder.glob(f"{beginning}*") if not path.name.startswith(self._prefix)]
        self.discard(found, served.version.overlays)
