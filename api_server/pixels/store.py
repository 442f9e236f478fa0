"""Images that clients fetch by URL: files of one folder that all API processes of a server share, for an hour.

The name of a file is its secret, and says its format. Files that are too old or too many are removed when others come.
Knows files; knows neither requests nor models.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from api_server.pixels.encoding import FORMATS, Format

# How long an image can be fetched.
SECONDS_KEPT = 3600.0
# Bytes of all images together: the oldest go first.
MOST_BYTES = 512 << 20
_NAME = re.compile(rf"[0-9a-f]{{32}}\.({'|'.join(FORMATS)})", re.ASCII)


class ImageStore:
    """The files. Methods block, and belong into a thread."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._clock = clock

    def put(self, file: bytes, kind: Format) -> str:
        """Keep an image. Returns its name. OSError when there is no room on the disk."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._make_room(len(file))
        name = f"{secrets.token_hex(16)}.{kind}"
        unfinished = self._folder / f"{name}.part"
        try:
            unfinished.write_bytes(file)
            now = self._clock()
            os.utime(unfinished, (now, now))
            unfinished.rename(self._folder / name)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        return name

    def find(self, name: str) -> tuple[bytes, str] | None:
        """The bytes and the format of an image; None if there is none of this name, or not any more."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        path = self._folder / name
        try:
            if path.stat().st_mtime < self._clock() - SECONDS_KEPT:
                return None
            return path.read_bytes(), found[1]
        except OSError:
            return None

    def _make_room(self, size: int) -> None:
        """Remove what is too old, and then the oldest until so many bytes fit."""
        kept: list[tuple[float, int, Path]] = []
        for path in self._folder.iterdir():
            try:
                facts = path.stat()
            except OSError:  # another process has removed it
                continue
            if facts.st_mtime < self._clock() - SECONDS_KEPT:
                path.unlink(missing_ok=True)
            else:
                kept.append((facts.st_mtime, facts.st_size, path))
        total = size + sum(each for _, each, _ in kept)
        for _, each, path in sorted(kept):
            if total <= self._most_bytes:
                break
            path.unlink(missing_ok=True)
            total -= each
