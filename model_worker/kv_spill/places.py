"""Where blocks lie beside the KV cache: a file on a disk, or memory of the host. Knows slots of equal size, and bytes.

The file has no name: no other process can open it. The kernel frees it when the last process that has it open ends.
A file system without such files gets one of mode 0600 whose name is removed at once.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_PREFIX = "tokenyard-kv-"
# What a file system says that has no files without names.
_UNNAMED_REFUSED = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


class Place(Protocol):
    """Slots of equal size. `name` says in words where they are."""

    name: str

    def write(self, slot: int, data: NDArray[np.uint8]) -> None:
        """Fill a slot. OSError if that cannot be done."""
        ...

    def read(self, slot: int, into: NDArray[np.uint8]) -> None:
        """Read a slot that was filled. OSError if that cannot be done."""
        ...


class MemoryPlace:
    """Slots in memory that the kernel provides when they are first filled."""

    name = "host memory"

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self._slots = np.zeros((slots, slot_bytes), np.uint8)

    def write(self, slot: int, data: NDArray[np.uint8]) -> None:
        self._slots[slot] = data

    def read(self, slot: int, into: NDArray[np.uint8]) -> None:
        into[:] = self._slots[slot]


class DiskPlace:
    """Slots in a file without a name. It grows as slots are filled."""

    def __init__(self, folder: Path, slot_bytes: int) -> None:
        """ValueError for a folder in which no file can be made."""
        self.name = f"the disk ({folder})"
        self._slot_bytes = slot_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_leftovers(folder)
            self._file = _unnamed_file(folder)
        except OSError as error:
            raise ValueError(
                f"kv_spill_dir {str(folder)!r} cannot be written to ({error.strerror}): name a folder of a disk where "
                "this user may make files"
            ) from None

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def write(self, slot: int, data: NDArray[np.uint8]) -> None:
        view = np.ascontiguousarray(data).data
        offset = slot * self._slot_bytes
        while len(view):
            written = os.pwrite(self._file, view, offset)
            view, offset = view[written:], offset + written

    def read(self, slot: int, into: NDArray[np.uint8]) -> None:
        view = into.data
        offset = slot * self._slot_bytes
        while len(view):
            count = os.preadv(self._file, [view], offset)
            if not count:
                raise OSError(errno.EIO, "the file has become shorter")
            view, offset = view[count:], offset + count

    @staticmethod
    def _remove_leftovers(folder: Path) -> None:
        """Remove files of processes that were killed between making a file and removing its name."""
        for path in folder.glob(f"{_PREFIX}*"):
            path.unlink(missing_ok=True)


def _unnamed_file(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in _UNNAMED_REFUSED or not folder.is_dir():
            raise
    file, path = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    # Another worker that starts in the same folder may have removed it.
    Path(path).unlink(missing_ok=True)
    return file
