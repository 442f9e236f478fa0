"""The meeting of a group's ranks, and the lines between the first one and the others.

Rank 0 listens at a path; each other rank comes, says which it is, and gets the shared memory of the exchange. The line
then carries messages from rank 0, and its end is the end of the rank at the other side. Knows sockets and processes.
Does not know models.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from model_worker.tensor_parallel.exchange import Exchange, GroupLost

# Seconds within which all ranks must have come.
MEETING_SECONDS = 120.0
# Seconds between two tries to reach rank 0.
_RETRY_SECONDS = 0.05
_LENGTH = struct.Struct("<Q")
# Most bytes of what two ranks say when they meet.
_GREETING_BYTES = 1 << 16


@dataclass(frozen=True)
class Place:
    """Which of how many ranks this process is, where they meet, and which start of the group this is.

    `terms` are settings that all must share, by name.
    """

    path: Path
    rank: int
    ranks: int
    epoch: int
    terms: Mapping[str, str]


class Leader:
    """The lines of rank 0 to the others."""

    def __init__(self, place: Place, slot_bytes: int, seconds: float = MEETING_SECONDS) -> None:
        """Wait for all other ranks. GroupLost names those that do not come, and settings that differ."""
        self._lines: dict[int, socket.socket] = {}
        self._pids = [os.getpid()] + [0] * (place.ranks - 1)
        size = Exchange.bytes_for(place.ranks, slot_bytes)
        descriptor = os.memfd_create("tokenyard-group")
        try:
            os.ftruncate(descriptor, size)
            with _listening(place.path) as door:
                self._meet(door, place, time.monotonic() + seconds)
            greeting = json.dumps({"pids": self._pids, "slot_bytes": slot_bytes}).encode()
            for line in self._lines.values():
                socket.send_fds(line, [greeting], [descriptor])
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.exchange = Exchange(memory, 0, self._pids, slot_bytes, self.check)

    @property
    def patience(self) -> float:
        """Seconds for which the slowest rank may be awaited."""
        return self.exchange.patience

    @patience.setter
    def patience(self, seconds: float) -> None:
        self.exchange.patience = seconds

    def send(self, message: bytes | bytearray) -> None:
        """Send a message to all. GroupLost for a rank that is gone, or takes nothing for the exchange's patience."""
        for rank, line in self._lines.items():
            line.settimeout(self.exchange.patience)
            try:
                line.sendall(_LENGTH.pack(len(message)) + message)
            except TimeoutError:
                raise GroupLost(f"rank {rank} (pid {self._pids[rank]}) hangs: it takes no message") from None
            except OSError:
                raise GroupLost(self._gone(rank)) from None

    def check(self) -> None:
        """Raise GroupLost if a rank has ended."""
        if story := self.trouble():
            raise GroupLost(story)

    def trouble(self) -> str:
        """Say which rank has ended; empty if none has."""
        return next((self._gone(rank) for rank, line in self._lines.items() if _is_closed(line)), "")

    def close(self) -> None:
        """End the lines, and with them the other ranks."""
        for line in self._lines.values():
            line.close()

    def _gone(self, rank: int) -> str:
        return f"rank {rank} (pid {self._pids[rank]}) of the group has ended"

    def _meet(self, door: socket.socket, place: Place, deadline: float) -> None:
        while len(self._lines) < place.ranks - 1:
            missing = [str(rank) for rank in range(1, place.ranks) if rank not in self._lines]
            door.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                line, _ = door.accept()
            except TimeoutError:
                raise GroupLost(f"rank {', '.join(missing)} of {place.ranks} has not come in time") from None
            line.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                said = json.loads(line.recv(_GREETING_BYTES))
                if said["epoch"] == place.epoch:
                    rank = int(said["rank"])
                    _compare(place.terms, said["terms"], rank)
                    self._lines[rank] = line
                    self._pids[rank] = int(said["pid"])
                    continue
            line.close()


class Follower:
    """The line of another rank to rank 0."""

    def __init__(self, place: Place, seconds: float = MEETING_SECONDS) -> None:
        """Come to rank 0. GroupLost if it is not there in time."""
        self._line = _reach(place, time.monotonic() + seconds)
        self._line.settimeout(seconds)
        try:
            greeting, descriptors, _, _ = socket.recv_fds(self._line, _GREETING_BYTES, 1)
        except OSError:
            descriptors = []
        if not descriptors:
            raise GroupLost("rank 0 of the group has refused this rank or has ended: its log says why")
        said = json.loads(greeting)
        self._pids = [int(pid) for pid in said["pids"]]
        size = Exchange.bytes_for(place.ranks, int(said["slot_bytes"]))
        try:
            memory = mmap.mmap(descriptors[0], size)
        finally:
            os.close(descriptors[0])
        self.exchange = Exchange(memory, place.rank, self._pids, int(said["slot_bytes"]), self.check)

    @property
    def patience(self) -> float:
        """Seconds for which the slowest rank may be awaited."""
        return self.exchange.patience

    @patience.setter
    def patience(self, seconds: float) -> None:
        self.exchange.patience = seconds

    def receive(self, seconds: float) -> bytes | None:
        """Return the next message; None if there is none within `seconds`. GroupLost when rank 0 has ended."""
        if not _is_readable(self._line, seconds):
            return None
        self._line.settimeout(self.exchange.patience)
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def check(self) -> None:
        """Raise GroupLost if rank 0 has ended."""
        if _is_closed(self._line):
            raise GroupLost(self._gone())

    def close(self) -> None:
        """End the line, and with it the group."""
        self._line.close()

    def _gone(self) -> str:
        return f"rank 0 (pid {self._pids[0]}) of the group has ended"

    def _read(self, length: int) -> bytes:
        parts = []
        while length:
            try:
                part = self._line.recv(min(length, 1 << 20))
            except TimeoutError:
                raise GroupLost(f"rank 0 (pid {self._pids[0]}) hangs in the middle of a message") from None
            except OSError:
                part = b""
            if not part:
                raise GroupLost(self._gone())
            parts.append(part)
            length -= len(part)
        return b"".join(parts)


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """Listen at a path, within this context."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(path))
        door.listen()
        try:
            yield door
        finally:
            path.unlink(missing_ok=True)


def _reach(place: Place, deadline: float) -> socket.socket:
    """Connect to rank 0 and greet it. One of an earlier start that is still ending refuses, and is tried again."""
    greeting = {"rank": place.rank, "epoch": place.epoch, "pid": os.getpid(), "terms": dict(place.terms)}
    while True:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.connect(str(place.path))
            line.sendall(json.dumps(greeting).encode())
            return line
        except OSError:
            line.close()
        if time.monotonic() >= deadline:
            raise GroupLost("rank 0 of the group has not come in time")
        time.sleep(_RETRY_SECONDS)


def _compare(own: Mapping[str, str], others: Mapping[str, str], rank: int) -> None:
    for name, value in own.items():
        if others.get(name) != value:
            raise GroupLost(f"rank {rank} has {name} {others.get(name)!r}, and rank 0 has {value!r}: start both alike")


def _is_readable(line: socket.socket, seconds: float) -> bool:
    poller = select.poll()
    poller.register(line, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def _is_closed(line: socket.socket) -> bool:
    """Whether the process at the other end has ended."""
    poller = select.poll()
    poller.register(line, select.POLLRDHUP)
    return bool(poller.poll(0))
