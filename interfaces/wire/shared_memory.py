"""Large arrays between processes of one host, without copying them through a socket.

A segment is a file of /dev/shm. It belongs to the process that made it: readers map it and never remove it, so that a
restarted reader can read it again, and the owner removes it when the request that needs it has ended. The name of a
segment names its owner: PID namespace, process, start time. So a sweep by any process finds the segments of dead ones.

multiprocessing.shared_memory is not used: its resource tracker removes segments of others when a process dies, and a
full /dev/shm kills its writer with SIGBUS. Written through write(2), the same is an error that can be handled.

Knows arrays and files; knows no message.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import mmap
import os
import re
import secrets
import stat
import sys
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger("tokenyard")

PREFIX = "tokenyard-"
DIRECTORY = Path("/dev/shm")
# Bytes from which an array of a message is put into a segment: below, packing it twice costs less than the segment
# (measured: `python -m benchmarks.wire`).
MESSAGE_THRESHOLD = 262_144
# Environment variables, the first that is set counts: the share of free shared memory one array may take; 0 turns
# shared memory off.
WATERMARK_VARIABLES = ("TOKENYARD_SHM_WATERMARK", "MODULAR_MAX_SHM_WATERMARK")

_WATERMARK = 0.9
_SECONDS_BETWEEN_WARNINGS = 30.0
_NAME = re.compile(re.escape(PREFIX) + r"(\d{1,20})-(\d{1,10})-(\d{1,20})-[0-9a-f]{16}", re.ASCII)


class SharedMemoryError(ValueError):
    """A segment cannot be read: its owner has removed it, or it is not what its placeholder says."""


@dataclass(frozen=True)
class SharedMemoryArray:
    """A placeholder for an array in a segment; `dtype` is numpy's type string ("<f4"). ValueError for names not of
    ours.

    Decoding makes an array of it again where an array is declared, and leaves it as it is where a SharedMemoryArray is
    declared: a process that only passes it on need not map it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name[:80]!r} is not the name of a segment of this system")
        object.__setattr__(self, "shape", tuple(self.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def open(self, writable: bool = False) -> NDArray[Any]:
        """Open the array: a view of the segment that stays valid after its removal. Raises SharedMemoryError.

        With `writable` changes stay private to this array.
        """
        try:
            descriptor = os.open(DIRECTORY / self.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise SharedMemoryError(f"segment {self.name} cannot be opened: {error.strerror}") from None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
                raise SharedMemoryError(f"segment {self.name} is not a file of this user")
            if self.nbytes == 0 or found.st_size != self.nbytes:
                raise SharedMemoryError(f"segment {self.name} has {found.st_size} bytes, not {self.nbytes}")
            access = mmap.ACCESS_COPY if writable else mmap.ACCESS_READ
            mapped = mmap.mmap(descriptor, self.nbytes, access=access)
        finally:
            os.close(descriptor)
        return np.frombuffer(mapped, self.dtype).reshape(self.shape)

    def unlink(self) -> None:
        """Remove the segment; a process that has opened it keeps it. Idempotent."""
        _unlink(self.name)


# An array of a message: itself, or its placeholder until `mapped`. A process that only passes it on never maps.
Shareable: TypeAlias = NDArray[Any] | SharedMemoryArray


def mapped(array: Shareable) -> NDArray[Any]:
    """Return the array, wherever it is. Raises SharedMemoryError when its owner has removed it."""
    return array.open() if isinstance(array, SharedMemoryArray) else array


class Segments:
    """The book of an owner: its segments that are not released yet, and the number of holders of each.

    All of it is released when the book goes, and when the process ends in order; after a kill by `sweep_segments`.
    """

    def __init__(self) -> None:
        self._holders: dict[str, int] = {}
        self._new: list[SharedMemoryArray] = []
        self._finalizer = weakref.finalize(self, _release_all, self._holders, os.getpid())

    def __len__(self) -> int:
        return len(self._holders)

    def share(self, array: NDArray[Any]) -> SharedMemoryArray | None:
        """Copy `array` into a new segment. None when there is no room, or it is empty: then it travels inline."""
        segment = self._create(array)
        if segment is not None:
            self._new.append(segment)
        return segment

    def reserve(self) -> str:
        """Return the name of a segment that another process will `fill` for this owner. It has one holder."""
        name = _new_name()
        self._holders[name] = 1
        return name

    def free(self, names: Iterable[str]) -> None:
        """Give reserved names back, with the segments that were written under them."""
        for name in names:
            if self._holders.pop(name, None) is not None:
                _unlink(name)

    def take(self) -> list[SharedMemoryArray]:
        """Return the segments shared since the last call: to be released when the request that they belong to has
        ended."""
        new = self._new
        self._new = []
        return new

    def hold(self, array: Shareable) -> Shareable:
        """Return the stand-in for `array` in a message: a segment when it is large and there is room, else the array
        itself.

        A segment of this book has one more holder now, and goes with the last: each calls `release` once.
        """
        if isinstance(array, SharedMemoryArray):
            if array.name in self._holders:
                self._holders[array.name] += 1
            return array
        if array.nbytes < MESSAGE_THRESHOLD:
            return array
        return self._create(array) or array

    def give_back(self, array: Shareable) -> Shareable:
        """Give a stand-in back, the opposite of `hold`: the last holder of a segment gets its array, which outlives
        it."""
        if not isinstance(array, SharedMemoryArray):
            return array
        last = self._holders.get(array.name) == 1
        try:
            return array.open() if last else array
        finally:
            self.release([array])

    def release(self, segments: Iterable[SharedMemoryArray]) -> None:
        """Release one holder of each segment; those without any are removed. Segments of others are left alone."""
        for segment in segments:
            holders = self._holders.get(segment.name, 0)
            if holders > 1:
                self._holders[segment.name] = holders - 1
            elif holders:
                del self._holders[segment.name]
                segment.unlink()

    def release_all(self) -> None:
        self._new = []
        while self._holders:
            _unlink(self._holders.popitem()[0])

    def _create(self, array: NDArray[Any]) -> SharedMemoryArray | None:
        if not 0 < array.nbytes < _room():
            if array.nbytes:
                _warn(f"no room in {DIRECTORY} for an array of {array.nbytes} bytes: it travels inline")
            return None
        segment = SharedMemoryArray(_new_name(), array.shape, array.dtype.str)
        self._holders[segment.name] = 1
        try:
            _write(segment.name, np.ascontiguousarray(array))
        except OSError as error:
            self.release([segment])
            _warn(f"{DIRECTORY} takes no array of {array.nbytes} bytes ({error.strerror}): it travels inline")
            return None
        return segment


def fill(name: str, array: NDArray[Any]) -> bool:
    """Write `array` under a name that its owner has reserved; False when there is no room for it."""
    if not 0 < array.nbytes < _room():
        return False
    try:
        _write(name, np.ascontiguousarray(array))
    except OSError:
        _unlink(name)
        return False
    return True


def sweep_segments() -> int:
    """Remove the segments whose owners are dead, and return their number. Any process of the user may call it at any
    time."""
    removed = 0
    namespace = _pid_namespace()
    with contextlib.suppress(FileNotFoundError), os.scandir(DIRECTORY) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            # The processes of another container are not visible here, so nothing can be said of them.
            if match is None or int(match[1]) != namespace or _started(int(match[2])) == int(match[3]):
                continue
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    os.unlink(entry.path)
                    removed += 1
    return removed


def _write(name: str, array: NDArray[Any]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(DIRECTORY / name, flags, 0o600)
    try:
        left = array.reshape(-1).view(np.uint8).data
        while left:
            left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


def _unlink(name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(DIRECTORY / name)


def _release_all(holders: dict[str, int], owner: int) -> None:
    # A forked child has a copy of the book, but the segments are its parent's.
    if os.getpid() == owner:
        for name in list(holders):
            _unlink(name)


def _room() -> float:
    """Return the bytes that one array may take."""
    watermark = _watermark()
    if watermark <= 0 or sys.platform != "linux":
        return 0.0
    try:
        free = os.statvfs(DIRECTORY)
    except OSError:
        return math.inf
    return free.f_frsize * free.f_bavail * watermark


@functools.cache
def _watermark() -> float:
    for variable in WATERMARK_VARIABLES:
        text = os.environ.get(variable)
        if text is None:
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 1:
            log.warning("%s must be a number between 0 and 1, got %r: %s is used", variable, text, _WATERMARK)
            return _WATERMARK
        if value == 0:
            log.warning("%s is 0: large arrays travel inline, not through shared memory", variable)
        return value
    return _WATERMARK


_last_warning = -math.inf


def _warn(text: str) -> None:
    global _last_warning
    now = time.monotonic()
    if _watermark() > 0 and now - _last_warning >= _SECONDS_BETWEEN_WARNINGS:
        _last_warning = now
        log.warning(text)


def _new_name() -> str:
    pid = os.getpid()
    return f"{PREFIX}{_pid_namespace()}-{pid}-{_own_start(pid)}-{secrets.token_hex(8)}"


@functools.cache
def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


@functools.lru_cache(maxsize=1)
def _own_start(pid: int) -> int:
    return _started(pid) or 0


def _started(pid: int) -> int | None:
    """Return the start of a living process in clock ticks since boot; None when there is none (a zombie lives no
    more)."""
    try:
        # The name in brackets may contain anything, so the fields are counted from its end.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
