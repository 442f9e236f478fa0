"""Wakes the thread that runs steps, which waits for sockets, when another thread has something for it."""

from __future__ import annotations

import contextlib
import socket


class WakeUp:
    """Becomes readable by `wake`, until `clear`. Any thread may call `wake`; it never waits."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._receiver.fileno()

    def wake(self) -> None:
        """Make it readable. Call it when what is to be taken is there already."""
        with contextlib.suppress(BlockingIOError):  # it is full, and readable
            self._sender.send(b"\0")

    def clear(self) -> None:
        """Make it wait for the next `wake`. Call it before anything is taken: what comes later wakes it again."""
        with contextlib.suppress(BlockingIOError):
            self._receiver.recv(4096)
