"""The meeting of a group's ranks on several hosts, and the messages from the first one to the others, over tcp.

Rank 0 listens at the rendezvous. Each other rank comes and says what it is. Rank 0 compares the settings, and tells it
where the ranks' tensors are joined: at a port that is another one at each start. All is encrypted and authenticated by
the keys of the worker, which all ranks have, but for the tensors. Knows sockets. Does not know models.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import zmq

from model_worker.tensor_parallel.exchange import START_SECONDS, GroupLost
from model_worker.tensor_parallel.links import MEETING_SECONDS
from shared.curve import Equals, bind_among_equals, connect_among_equals
from shared.setting_forms import host_and_port

log = logging.getLogger(__name__)

# Seconds between two greetings of a rank that waits for rank 0.
_GREETING_SECONDS = 0.5
_DIGEST_BYTES = 8


@dataclass(frozen=True)
class NetworkPlace:
    """Which of how many ranks this process is, where they meet, and the folder of the keys that all of them have.

    `terms` are settings that all must share, by name.
    """

    rendezvous: str
    rank: int
    ranks: int
    keys: Path
    terms: Mapping[str, str]

    def address(self, seconds: float) -> tuple[str, int]:
        """Return the address of the rendezvous, as a number, and its port. GroupLost if its name is not known in time.

        Kubernetes knows the name of a pod some seconds after it has started.
        """
        host, port = host_and_port(self.rendezvous)
        deadline = time.monotonic() + seconds
        while True:
            try:
                return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port
            except OSError as error:
                if time.monotonic() >= deadline:
                    text = f"the host of the rendezvous {self.rendezvous} is not known: {error}"
                    raise GroupLost(text) from None
            time.sleep(_GREETING_SECONDS)

    def digest(self) -> str:
        """Return a digest of the settings that all must share."""
        return blake2b(json.dumps(dict(self.terms), sort_keys=True).encode(), digest_size=_DIGEST_BYTES).hexdigest()


class NetworkLeader:
    """The links of rank 0 to the others. `store_port` and `beat_port` are where tensors and heartbeats meet."""

    def __init__(self, place: NetworkPlace, seconds: float = MEETING_SECONDS) -> None:
        """Listen, as soon as the rendezvous is known. ValueError where the rendezvous is no address of this host."""
        self.place = place
        self.patience = START_SECONDS
        # What ranks are called, by their numbers.
        self.names = {0: f"rank 0 (pid {os.getpid()} on {socket.gethostname()})"}
        self.address, port = place.address(seconds)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = Equals(self._context, place.keys)
        self._identities: dict[int, bytes] = {}
        self._router = router(self._context)
        self.beats = router(self._context)
        try:
            bind_among_equals(self._router, endpoint(self.address, port), place.keys)
            bind_among_equals(self.beats, endpoint(self.address, 0), place.keys)
        except zmq.ZMQError as error:
            self.close()
            text = f"rendezvous {place.rendezvous} cannot be bound by rank 0: {error}; name an address of its host"
            raise ValueError(text) from None
        self.beat_port = int(self.beats.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def meet(self, store_port: int, seconds: float = MEETING_SECONDS) -> None:
        """Wait for all other ranks. GroupLost names those that do not come. One with other settings is refused."""
        deadline = time.monotonic() + seconds
        others = range(1, self.place.ranks)
        while missing := [str(rank) for rank in others if rank not in self._identities]:
            left = deadline - time.monotonic()
            if left <= 0 or not self._router.poll(max(1, int(1000 * left))):
                text = f"rank {', '.join(missing)} of {self.place.ranks} has not come to {self.place.rendezvous}"
                raise GroupLost(f"{text} in {seconds:.0f} s")
            identity, message = self._router.recv_multipart()
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._greet(identity, json.loads(message))
        welcome = json.dumps({"names": self.names, "store": store_port, "beats": self.beat_port}).encode()
        for identity in self._identities.values():
            self._router.send_multipart([identity, welcome])

    def send(self, message: bytes | bytearray) -> None:
        """Send a message to all. GroupLost for a rank that is gone, or takes nothing for the patience."""
        self._router.setsockopt(zmq.SNDTIMEO, int(1000 * self.patience))
        for rank, identity in self._identities.items():
            try:
                self._router.send_multipart([identity, message])
            except zmq.Again:
                raise GroupLost(f"{self.names[rank]} hangs: it takes no message") from None
            except zmq.ZMQError:
                raise GroupLost(f"{self.names[rank]} has ended, or its host is not there", blamed=False) from None

    def close(self) -> None:
        """End the links."""
        for each in (self._router, self.beats):
            each.close(linger=0)
        # It has a socket of the context, too.
        self._guard.stop()
        self._context.term()

    def _greet(self, identity: bytes, said: Mapping[str, Any]) -> None:
        rank = int(said["rank"])
        if not 1 <= rank < self.place.ranks:
            self._refuse(identity, f"rank {rank} is none of the {self.place.ranks} ranks of this group")
        elif said["digest"] != self.place.digest():
            self._refuse(identity, _difference(self.place.terms, said["terms"], rank))
        else:
            # A rank that has started anew meanwhile takes the place of what it was.
            self._identities[rank] = identity
            self.names[rank] = f"rank {rank} (pid {int(said['pid'])} on {str(said['host'])[:99]})"

    def _refuse(self, identity: bytes, reason: str) -> None:
        log.error("%s", reason)
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([identity, json.dumps({"refused": reason}).encode()])


class NetworkFollower:
    """The link of another rank to rank 0."""

    def __init__(self, place: NetworkPlace, seconds: float = MEETING_SECONDS) -> None:
        """Come to rank 0. GroupLost if it is not there in time, ValueError where it refuses this rank's settings."""
        self.place = place
        self.patience = START_SECONDS
        self.address, port = place.address(seconds)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = dealer(self._context)
        connect_among_equals(self._dealer, endpoint(self.address, port), place.keys)
        said = self._come(time.monotonic() + seconds, seconds)
        self.names = {int(rank): str(name) for rank, name in said["names"].items()}
        self.store_port = int(said["store"])
        self.beats = dealer(self._context)
        connect_among_equals(self.beats, endpoint(self.address, int(said["beats"])), place.keys)

    def receive(self, seconds: float) -> bytes | None:
        """Return the next message; None if there is none within `seconds`."""
        return self._dealer.recv() if self._dealer.poll(int(1000 * seconds)) else None

    def close(self) -> None:
        """End the link."""
        self._context.destroy(linger=0)

    def _come(self, deadline: float, seconds: float) -> dict[str, Any]:
        place = self.place
        greeting = {
            "rank": place.rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "digest": place.digest(),
            "terms": dict(place.terms),
        }
        while time.monotonic() < deadline:
            # A rank 0 that has ended meanwhile has not read the last one.
            with contextlib.suppress(zmq.Again):
                self._dealer.send(json.dumps(greeting).encode(), zmq.NOBLOCK)
            if self._dealer.poll(int(1000 * _GREETING_SECONDS)):
                said: dict[str, Any] = json.loads(self._dealer.recv())
                if "refused" in said:
                    raise ValueError(said["refused"])
                return said
        raise GroupLost(f"rank 0 has not come to {place.rendezvous}, or not all ranks have, in {seconds:.0f} s")


def router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return a socket on which a message to a peer that is gone is an error."""
    made = context.socket(zmq.ROUTER)
    made.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return made


def dealer(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return a socket whose messages are for a peer that is there."""
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.IMMEDIATE, 1)
    return made


def endpoint(address: str, port: int) -> str:
    """Return the endpoint of an address and a port; 0 is any that is free."""
    shown = f"[{address}]" if ":" in address else address
    return f"tcp://{shown}:{port or '*'}"


def _difference(own: Mapping[str, str], others: Mapping[str, str], rank: int) -> str:
    for name, value in own.items():
        if others.get(name) != value:
            return f"rank {rank} has {name} {others.get(name)!r}, and rank 0 has {value!r}: start both alike"
    return f"rank {rank} has settings that rank 0 has not"
