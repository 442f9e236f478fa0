"""Publishes over ZeroMQ which prefixes each worker holds, in the form of vLLM's KV events.

Routers in front of several servers (Dynamo's, llm-d's, LMCache's and Mooncake's indexers) keep an index by them. A PUB
socket sends (topic, number, batch), the number in 8 bytes, big endian, and the batch as msgpack `[time, [events],
worker]`. A ROUTER at the next port sends batches again, from a number on, and then the number -1. It sends a few in
each turn of the scheduler's loop, for clients come first. Off unless an operator names an endpoint. Knows frames and
hashes; does not know requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import zmq

from scheduler.kv_log import KvLog, Removed, Stored
from scheduler.kv_subscribers import Subscribers
from scheduler.workers import Worker
from shared.curve import secure_server
from shared.settings import SettingsError
from shared.sockets import MAX_MESSAGE_BYTES, readable

# Batches that can be had again, and their bytes together.
KEPT_BATCHES = 10_000
KEPT_BYTES = 64 * 2**20
# Batches that a slow reader may lag behind before it misses some, which it can have again.
QUEUED_BATCHES = 1_000
# Subscribers at a time: each has a queue of its own.
MAX_SUBSCRIBERS = 64
# Batches that are sent again in one turn, and requests for some that are taken in it.
TURN_BATCHES = 16
TURN_REQUESTS = 16
# Readers that may wait for batches at a time; another one takes the place of the first.
MAX_READERS = 64
# Seconds after which a reader that takes nothing is given up.
READER_SECONDS = 10.0
# Time until the next turn, while readers wait and nothing else happens.
TURN_MS = 2
_END = (-1).to_bytes(8, "big", signed=True)
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(slots=True)
class _Reader:
    """The next batch that a reader gets, and when it took the last one."""

    number: int
    since: float


class KvEvents:
    """Owns the two sockets. `publish` never waits, and sends no more than `TURN_BATCHES` again."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        model: str,
        keys: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind at `endpoint` and at its next port. SettingsError where that is not possible, or not safe.

        On an address that others reach the readers need the CURVE keys of a peer; `keys` is the server's folder, and a
        `PeerList` is there.
        """
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        secure = host not in _LOOPBACK
        if secure and keys is None:
            text = "on an address that other machines reach it wants worker_endpoint and curve_keys; or use 127.0.0.1"
            raise SettingsError(f"kv_events {endpoint!r}: {text}")
        self._topic = f"kv@{host}:{port}@{model}".encode()
        self._number = 0
        self._clock = clock
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        # Those that miss batches, the one first that has waited longest.
        self._readers: dict[bytes, _Reader] = {}
        self._epochs: dict[int, int] = {}
        self._events: zmq.Socket[bytes] = context.socket(zmq.PUB)
        self._replay: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._subscribers = Subscribers(context, self._events, endpoint, MAX_SUBSCRIBERS)
        # A reader that does not take what it asked for is noticed; what it cannot take waits here.
        self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            for socket, bound in ((self._events, endpoint), (self._replay, f"tcp://{host}:{int(port) + 1}")):
                socket.setsockopt(zmq.SNDHWM, QUEUED_BATCHES)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
                if secure and keys is not None:
                    secure_server(socket, keys)
                socket.bind(bound)
        except zmq.ZMQError as error:
            self.close()
            raise SettingsError(f"kv_events {endpoint!r}: {bound} cannot be bound: {error}") from None

    @property
    def requests(self) -> zmq.Socket[bytes]:
        """Becomes readable when a reader asks for what it missed."""
        return self._replay

    @property
    def owes(self) -> bool:
        """Whether readers wait for batches: `publish` wants to be called in `TURN_MS`."""
        return bool(self._readers)

    def close(self) -> None:
        self._subscribers.close()
        self._events.close(linger=0)
        self._replay.close(linger=0)

    def attach(self, workers: Mapping[int, Worker]) -> None:
        """Begin the logs of new workers, and publish that the caches of lost ones are gone."""
        for index in [index for index, epoch in self._epochs.items() if _epoch(workers, index) != epoch]:
            del self._epochs[index]
            self._send([["AllBlocksCleared"]], index)
        for index, worker in workers.items():
            if worker.beginnings.kv_log is None and worker.pool.num_blocks:
                worker.beginnings.kv_log = KvLog(worker.pool, worker.block_size)
                self._epochs[index] = worker.hello.epoch

    def publish(self, workers: Mapping[int, Worker]) -> None:
        """Send what has changed, and answer those who have missed something."""
        self._subscribers.look()
        for index, worker in workers.items():
            if worker.beginnings.kv_log is not None and (changes := worker.beginnings.kv_log.take()):
                self._send([_form(change, worker.block_size) for change in changes], index)
        self._answer()

    def _send(self, events: list[Any], index: int) -> None:
        batch = msgpack.packb([time.time(), events, index])
        self._kept.append(batch)
        self._kept_bytes += len(batch)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft())
        self._events.send_multipart([self._topic, self._number.to_bytes(8, "big"), batch], zmq.NOBLOCK)
        self._number += 1

    def _answer(self) -> None:
        """Take requests, the last one of each reader, and send one reader some of its batches."""
        for _ in range(TURN_REQUESTS):
            if not readable(self._replay):
                break
            identity, *_, first = self._replay.recv_multipart(zmq.NOBLOCK)
            self._readers.pop(identity, None)
            if len(self._readers) >= MAX_READERS:
                del self._readers[next(iter(self._readers))]
            self._readers[identity] = _Reader(int.from_bytes(first[:8], "big"), self._clock())
        if not self._readers:
            return
        identity = next(iter(self._readers))
        reader = self._readers.pop(identity)
        if self._send_again(identity, reader) and self._clock() - reader.since < READER_SECONDS:
            self._readers[identity] = reader

    def _send_again(self, identity: bytes, reader: _Reader) -> bool:
        """Send a reader its next batches. Returns whether it waits for more."""
        begin = self._number - len(self._kept)
        reader.number = max(reader.number, begin)
        try:
            for _ in range(TURN_BATCHES):
                ended = reader.number >= self._number
                number = _END if ended else reader.number.to_bytes(8, "big")
                batch = b"" if ended else self._kept[reader.number - begin]
                self._replay.send_multipart([identity, b"", number, batch], zmq.NOBLOCK)
                reader.since = self._clock()
                reader.number += 1
                if ended:
                    return False
        except zmq.Again:
            # It has not taken what it was sent.
            return True
        except zmq.ZMQError:
            # It is gone.
            return False
        return True


def _form(change: Stored | Removed, block_size: int) -> list[Any]:
    if isinstance(change, Removed):
        return ["BlockRemoved", list(map(_number, change.hashes)), "GPU"]
    hashes = list(map(_number, change.hashes))
    parent = None if change.parent is None else _number(change.parent)
    return ["BlockStored", hashes, parent, change.tokens, block_size, change.adapter, "GPU"]


def _number(digest: bytes) -> int:
    """A block's hash as readers take it: 64 bits of the digest."""
    return int.from_bytes(digest[:8], "big")


def _epoch(workers: Mapping[int, Worker], index: int) -> int | None:
    worker = workers.get(index)
    return None if worker is None else worker.hello.epoch
