"""The file that says which version of the weights a server serves, and the stamps that distinguish files of weights.

The scheduler writes the file before workers change, and a worker that starts reads it: so one that died comes back with
the version that is served. Knows paths. Does not know what is in the files of weights.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from interfaces import FIRST_VERSION, KV_CACHE, WEIGHTS, WeightsVersion
from shared.json_files import parse_json

log = logging.getLogger(__name__)

# Only this server's user may read the file: paths are an operator's matter.
_FILE_MODE = 0o600
# Ends of the names of files that make a model's numbers.
_ENDS = (".safetensors", ".json", ".gguf")


@dataclass(frozen=True, slots=True)
class Overlay:
    """A file of tensors that replace those of the checkpoint: their names, and the bytes of the file."""

    path: str
    names: list[str]
    size: int


@dataclass(frozen=True, slots=True)
class Served:
    """What a server serves: a version, its overlays, oldest first, and the tags of memory that was released."""

    version: WeightsVersion
    overlays: list[Overlay] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


# What a server serves whose weights were never changed.
AT_FIRST = Served(WeightsVersion(0, FIRST_VERSION))


class WeightsFile:
    """The file of the version that is served. It outlives the scheduler and workers, not the server."""

    def __init__(self, path: Path | None, uploads: Path | None = None) -> None:
        """None: nothing is kept. Tensors that are sent to the server lie in the folder `uploads`."""
        self._path = path
        self.uploads = uploads

    def read(self) -> Served:
        """Return what is served. ValueError or OSError for a file that cannot be read."""
        if self._path is None:
            return AT_FIRST
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return AT_FIRST
        try:
            return _served(json.loads(text))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{self._path} is damaged ({error!r}): restart the server") from None

    def discard(self, paths: Iterable[str]) -> None:
        """Remove files that were sent. Others are an operator's, and stay."""
        for path in map(Path, paths):
            if self.uploads is not None and path.parent == self.uploads:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    log.warning("%s cannot be removed: %s", path, error.strerror)

    def write(self, served: Served) -> None:
        """Keep this. A reader finds the old file or the new one, never a part. OSError when it cannot be written."""
        if self._path is None:
            return
        unnamed = self._path.with_suffix(".new")
        descriptor = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _FILE_MODE)
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(asdict(served)))
        unnamed.replace(self._path)


def stamp_of(source: str, overlays: list[str]) -> str:
    """Name the files of a version by their sizes and times of change. OSError for one that is missing."""
    digest = blake2b(digest_size=16)
    folder = Path(source).expanduser()
    found = sorted(path for path in folder.iterdir() if path.name.endswith(_ENDS)) if folder.is_dir() else []
    if folder.is_file():
        found = [folder]
    for path in [*found, *(Path(one) for one in overlays)]:
        facts = path.stat()
        digest.update(f"{path.name}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def bytes_of(source: str, overlays: list[str]) -> int:
    """Return the bytes of a version's files of weights; 0 for a source that is no folder or file here."""
    folder = Path(source).expanduser()
    found = [path for path in folder.iterdir() if path.suffix == ".safetensors"] if folder.is_dir() else []
    if folder.is_file():
        found = [folder]
    return sum(path.stat().st_size for path in [*found, *(Path(one) for one in overlays)])


def overlay_of(path: str) -> Overlay:
    """Describe a file of tensors; one that cannot be read has no names."""
    try:
        return Overlay(path, names_in(Path(path)), Path(path).stat().st_size)
    except (OSError, ValueError):
        return Overlay(path, [], 0)


def names_in(path: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file. ValueError for a file that is none."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(path.stat().st_size, _LONGEST_HEADER):
            raise ValueError(f"{path.name} is no safetensors file")
        header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} is no safetensors file")
    return [name for name in header if name != "__metadata__"]


# Most bytes of the header of a safetensors file that is read here.
_LONGEST_HEADER = 100 << 20


def _served(value: dict[str, Any]) -> Served:
    version = WeightsVersion(**value["version"])
    kinds: dict[str, Any] = {"number": int, "name": str, "source": str, "overlays": list, "stamp": str}
    for name, kind in kinds.items():
        if type(getattr(version, name)) is not kind:
            raise ValueError(f"{name} must be {kind.__name__}")
    overlays = [
        Overlay(str(one["path"]), [str(name) for name in one["names"]], int(one["size"])) for one in value["overlays"]
    ]
    absent = [tag for tag in (WEIGHTS, KV_CACHE) if tag in value["absent"]]
    return Served(version, overlays, absent)
