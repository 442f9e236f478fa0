"""Folders and files of weights that an operator may name to a running server.

Knows paths. Does not know what is in the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

# Ends of names of files that a model is read from.
_READ = (".safetensors", ".json", ".gguf")


def confined_weights(path: str, folders: Sequence[Path], own: str) -> str:
    """Return the real place of weights that a caller names, below one of `folders`, or the server's `own` model.

    A relative path counts from each folder. Links must not lead out of them. Raises FileNotFoundError where nothing is,
    and ValueError for a place that is elsewhere.
    """
    if path == own:
        return own
    asked = PurePath(path)
    if "\0" in path or ".." in asked.parts:
        raise ValueError(f"{path!r:.200} has .. or NUL in it: name a folder below one of --weights-dirs")
    roots = [folder.resolve() for folder in folders]
    found = next((place for place in _places(asked, folders) if place.exists()), None)
    if not any(_is_below(place, roots) for place in _places(asked, folders)):
        allowed = ", ".join(map(str, folders)) or "none"
        raise ValueError(f"{path!r:.200} is not below a folder of --weights-dirs (the server has: {allowed})")
    if found is None:
        raise FileNotFoundError(f"there is nothing at {path!r:.200}")
    outside = next((one for one in _files(found) if not _is_below(one, roots)), None)
    if outside is not None:
        raise ValueError(f"{os.fspath(outside)!r:.200} leads out of the folders of --weights-dirs: copy it there")
    return str(found.resolve())


def _places(asked: PurePath, folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        yield Path(asked) if asked.is_absolute() else folder / asked


def _files(place: Path) -> list[Path]:
    """List a place and the files in it that are read."""
    inside = [one for one in place.iterdir() if one.name.endswith(_READ)] if place.is_dir() else []
    return [place, *inside]


def _is_below(place: Path, roots: Sequence[Path]) -> bool:
    real = place.resolve()
    return any(real.is_relative_to(root) and real != root for root in roots)
