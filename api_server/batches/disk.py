"""Files that are written whole or not at all, and folders that others change meanwhile."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson


def make_writable(folder: Path) -> None:
    """Makes a folder. OSError where this process cannot write there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def read(path: Path) -> Any:
    """The JSON of a file; None where there is none."""
    try:
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def replace_whole(path: Path, value: Any) -> None:
    """Writes a file whole, or not at all."""
    with replacing(path, value):
        pass


@contextlib.contextmanager
def replacing(path: Path, value: Any) -> Iterator[None]:
    """Writes a file whole, or not at all; it gets its name behind the block."""
    data = orjson.dumps(value)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)


def walk(folder: Path) -> Iterator[Path]:
    """The files below a folder. What is renamed or deleted meanwhile may be left out."""
    for where, _, names in os.walk(folder):
        for name in names:
            yield Path(where, name)


def inside(folder: Path, ending: str = "") -> list[Path]:
    """The entries of a folder; none where it is not there."""
    try:
        return [path for path in folder.iterdir() if path.name.endswith(ending)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def facts_of(path: Path) -> os.stat_result | None:
    """What the system knows of a file; None where it is gone."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return path.stat()
    return None


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
