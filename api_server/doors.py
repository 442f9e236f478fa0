"""Closes the listening sockets of all API processes without breaking a connection. Knows sockets and lock files.

The kernel breaks what is in a listen queue when the last process closes the socket, also a connection that comes after
the queue was found empty. So the last process has the kernel ignore new connections first: their clients knock again a
second later, and are refused then.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import IO

# Of asm-generic/socket.h; Python has no names for them.
_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
# A classic BPF program on the header of a TCP segment: drop it if it has SYN without ACK, and keep every other one.
_LOAD_BYTE, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x54, 0x15, 0x06
_FLAGS, _SYN, _ACK = 13, 0x02, 0x10
_IGNORE_NEW = (
    (_LOAD_BYTE, 0, 0, _FLAGS),
    (_AND, 0, 0, _SYN | _ACK),
    (_JUMP_IF_EQUAL, 0, 1, _SYN),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, 0xFFFFFFFF),
)
_SECONDS_BETWEEN_TRIES = 0.01
# The lock of the process that closes its sockets.
_TURN = "closing"


class Doors:
    """The listening sockets that this process shares with other API processes: a lock says who has them."""

    def __init__(self, folder: Path, doors: Sequence[socket.socket]) -> None:
        """Have the kernel let connections in: a process before may have ended by a signal of its own."""
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._own = folder / f"{os.getpid()}.lock"
        # Whoever closes its sockets now sees this process' lock, or has ended when the filter is taken away.
        with (folder / _TURN).open("w") as turn:
            fcntl.lockf(turn, fcntl.LOCK_EX)
            self._held: IO[str] | None = self._own.open("w")
            fcntl.lockf(self._held, fcntl.LOCK_EX)
            for door in doors:
                accept_new(door)

    @contextlib.asynccontextmanager
    async def closing(self) -> AsyncIterator[bool]:
        """The sockets must be closed within. True where no other process has them; none closes its own meanwhile."""
        try:
            turn = (self._folder / _TURN).open("w")
        except OSError:  # the run directory is gone, so the supervisor is
            yield False
            return
        with turn:
            while not _locked(turn):  # noqa: ASYNC110 (the lock of a file has no event)
                await asyncio.sleep(_SECONDS_BETWEEN_TRIES)
            others = (path for path in self._folder.glob("*.lock") if path != self._own)
            try:
                yield not any(map(_is_held, others))
            finally:
                if self._held is not None:
                    self._held.close()
                    self._held = None


def ignore_new(door: socket.socket) -> None:
    """Have the kernel ignore connections that do not exist yet. OSError where it cannot."""
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in _IGNORE_NEW)
    held = ctypes.create_string_buffer(program, len(program))
    door.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(_IGNORE_NEW), ctypes.addressof(held)))


def accept_new(door: socket.socket) -> None:
    """Take back `ignore_new`, which stays with a socket that another process holds as well."""
    with contextlib.suppress(OSError):  # there is no filter, or the kernel has none
        door.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def accept_waiting(door: socket.socket) -> list[socket.socket]:
    """Accept the connections in the listen queue, and close the socket."""
    arrived: list[socket.socket] = []
    with door, contextlib.suppress(OSError):
        while True:
            arrived.append(door.accept()[0])
    return arrived


def _is_held(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("w") as file:
        return not _locked(file)
    return False


def _locked(file: IO[str]) -> bool:
    """Whether this process has the lock now. It lasts until the file is closed."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
