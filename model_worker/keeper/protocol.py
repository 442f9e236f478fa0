"""What a model worker asks of the keeper of its weights, and what that answers.

Each message is one packet of msgpack on a Unix socket in the run directory, and may carry one descriptor. The worker
asks, the keeper answers, one after the other. Knows no memory.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

_MOST_BYTES = 1 << 16
# Seconds in which the keeper answers: it moves nothing. A worker may wait for it between two steps.
_PATIENCE = 5.0
# Seconds in which a keeper that starts with its worker is there, and between looks.
START_SECONDS = 1.0
_PAUSE = 0.02


class Open(msgspec.Struct, frozen=True, tag=True):
    """Ask for weights with this identity. What is kept of others is freed. The manifest comes with the answer."""

    identity: str


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Ask for a piece of the weights that were found."""

    piece: int


class Make(msgspec.Struct, frozen=True, tag=True):
    """Ask for a new piece of so many bytes."""

    size: int


class Seal(msgspec.Struct, frozen=True, tag=True):
    """Say that the pieces made are filled. The descriptor of the manifest comes with it."""

    identity: str


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Have all memory freed."""


Request = Open | Fetch | Make | Seal | Drop


class Answer(msgspec.Struct, frozen=True):
    """An answer; the `reason` why the request was not granted is empty where it was.

    A keeper that is not `able` can share no memory of its device.
    """

    reason: str = ""
    able: bool = True


def send(connection: socket.socket, message: Any, descriptor: int | None = None) -> None:
    """Send a message, and a copy of a descriptor. OSError where the other side has gone."""
    data = msgspec.msgpack.encode(message)
    socket.send_fds(connection, [data], [] if descriptor is None else [descriptor])


def receive(connection: socket.socket, kind: Any) -> tuple[Any, int | None] | None:
    """Return the next message and the descriptor that came with it, which is the caller's to close. None at the end.

    ValueError for what is no message of this kind.
    """
    data, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    descriptor = descriptors[0] if descriptors else None
    if not data:
        return None
    try:
        return msgspec.msgpack.decode(data, type=kind), descriptor
    except msgspec.MsgspecError as error:
        if descriptor is not None:
            os.close(descriptor)
        raise ValueError(f"a message that is none: {error}") from None


class Conversation:
    """A worker's conversation with its keeper."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def ask(self, request: Request, descriptor: int | None = None) -> tuple[Answer, int | None]:
        """Return the answer, and the descriptor that came with it. OSError where there is none: a
        ConnectionError where the keeper has ended."""
        send(self._connection, request, descriptor)
        try:
            received = receive(self._connection, Answer)
        except ValueError as error:
            raise OSError(f"the keeper of the weights sent {error}") from None
        if received is None:
            raise ConnectionResetError("the keeper of the weights has ended")
        return received

    def descriptor(self, request: Request) -> int:
        """Return the descriptor that a request gives. OSError says why it was refused."""
        answer, descriptor = self.ask(request)
        if descriptor is None:
            raise OSError(answer.reason or "the keeper of the weights sent no descriptor")
        return descriptor


@contextlib.contextmanager
def conversation(path: Path, wait: float = 0.0) -> Iterator[Conversation]:
    """Talk to the keeper that listens at `path`. ConnectionError where none does within `wait` seconds."""
    deadline = time.monotonic() + wait
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_PATIENCE)
        while True:
            try:
                connection.connect(str(path))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() >= deadline:
                    raise ConnectionRefusedError("no keeper of the weights is there") from None
                time.sleep(_PAUSE)
        yield Conversation(connection)
