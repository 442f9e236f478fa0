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

from model_worker.tensor_parallel.exchange import START_SECONDS, GroupLost, NotMet
from model_worker.tensor_parallel.links import MEETING_SECONDS
from shared.curve import Equals, bind_among_equals, connect_among_equals
from shared.setting_forms import host_and_port

log = logging.getLogger(__name__)

# Seconds between two greetings of a rank that waits for rank 0.
_GREETING_SECONDS = 0.5
# Seconds after which a rank that greets no more has ended.
_ABSENT_SECONDS = 3.0
# Seconds between two attempts to listen, and between two looks at where the rendezvous is.
_RETRY_SECONDS = 2.0
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

    def address(self) -> tuple[str, int]:
        """Return the address of the rendezvous, as a number, and its port. NotMet if its name is not known.

        Kubernetes knows the name of a pod some seconds after it has started, and until then maybe an earlier address.
        """
        host, port = host_and_port(self.rendezvous)
        try:
            return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port
        except OSError as error:
            raise NotMet(f"the host of the rendezvous {self.rendezvous} is not known: {error}") from None

    def digest(self) -> str:
        """Return a digest of the settings that all must share."""
        return blake2b(json.dumps(dict(self.terms), sort_keys=True).encode(), digest_size=_DIGEST_BYTES).hexdigest()


class NetworkLeader:
    """The links of rank 0 to the others. `store_port` and `beat_port` are where tensors and heartbeats meet."""

    def __init__(self, place: NetworkPlace, seconds: float = MEETING_SECONDS) -> None:
        """Listen, as soon as the rendezvous is known and an address of this host.

        NotMet or ValueError where it is not in so many seconds: its name may be looked up in vain, or lead elsewhere.
        """
        self.place = place
        self.patience = START_SECONDS
        # What ranks are called, by their numbers.
        self.names = {0: f"rank 0 (pid {os.getpid()} on {socket.gethostname()})"}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = Equals(self._context, place.keys)
        self._identities: dict[int, bytes] = {}
        # Which process each rank is, by its number and its host's name, and when it was heard.
        self._heard: dict[int, tuple[int, str, float]] = {}
        self._met = False
        self._listen(time.monotonic() + seconds)
        self.beat_port = int(self.beats.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def meet(self, store_port: int, seconds: float = MEETING_SECONDS) -> None:
        """Wait for all other ranks. NotMet names those that do not come. One with other settings is refused."""
        deadline = time.monotonic() + seconds
        others = range(1, self.place.ranks)
        while missing := [str(rank) for rank in others if rank not in self._identities]:
            left = deadline - time.monotonic()
            if left <= 0 or not self._router.poll(max(1, int(1000 * left))):
                text = f"rank {', '.join(missing)} of {self.place.ranks} has not come to {self.place.rendezvous}"
                raise NotMet(f"{text} in {seconds:.0f} s")
            self._hear()
        welcome = json.dumps({"names": self.names, "store": store_port, "beats": self.beat_port}).encode()
        for rank, identity in self._identities.items():
            try:
                self._router.send_multipart([identity, welcome])
            except zmq.ZMQError:
                raise NotMet(f"{self.names[rank]} has come, and ended before all were there") from None
        self._met = True
        # Ranks repeat their greetings while this one waits for the others. A second process of a rank is refused here.
        while self._router.poll(0):
            self._hear()

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
        self._end()

    def _listen(self, deadline: float) -> None:
        """Bind the rendezvous. Its name is looked up for each attempt: an answer may be that of an earlier pod."""
        place = self.place
        while True:
            problem: Exception
            try:
                self.address, port = place.address()
                self._router = self._bound(port)
                self.beats = self._bound(0)
                return
            except NotMet as error:
                problem = error
            except zmq.ZMQError as error:
                text = f"rendezvous {place.rendezvous} cannot be bound by rank 0: {error}; name an address of its host"
                problem = ValueError(text)
            if time.monotonic() >= deadline:
                self._end()
                raise problem
            log.warning("%s; it tries again until all ranks should have met", problem)
            time.sleep(_RETRY_SECONDS)

    def _bound(self, port: int) -> zmq.Socket[bytes]:
        made = router(self._context, self.address)
        try:
            bind_among_equals(made, endpoint(self.address, port), self.place.keys)
        except zmq.ZMQError:
            made.close(linger=0)
            raise
        return made

    def _end(self) -> None:
        # It has a socket of the context, too.
        self._guard.stop()
        self._context.term()

    def _hear(self) -> None:
        identity, message = self._router.recv_multipart()
        with contextlib.suppress(ValueError, KeyError, TypeError):
            self._greet(identity, json.loads(message))

    def _greet(self, identity: bytes, said: Mapping[str, Any]) -> None:
        rank = int(said["rank"])
        pid, host = int(said["pid"]), str(said["host"])[:99]
        now = time.monotonic()
        first = self._heard.get(rank)
        if not 1 <= rank < self.place.ranks:
            self._refuse(identity, f"rank {rank} is none of the {self.place.ranks} ranks of this group")
        elif said["digest"] != self.place.digest():
            self._refuse(identity, _difference(self.place.terms, said["terms"], rank))
        elif first is not None and first[:2] != (pid, host) and (self._met or now - first[2] < _ABSENT_SECONDS):
            who = f"pid {first[0]} on {first[1]}, and pid {pid} on {host}"
            self._refuse(identity, f"two say that they are rank {rank}: {who}; each host has another --node")
        elif not self._met:
            # A rank that has started anew meanwhile takes the place of what it was.
            self._heard[rank] = pid, host, now
            self._identities[rank] = identity
            self.names[rank] = f"rank {rank} (pid {pid} on {host})"

    def _refuse(self, identity: bytes, reason: str) -> None:
        log.error("%s", reason)
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([identity, json.dumps({"refused": reason}).encode()])


class NetworkFollower:
    """The link of another rank to rank 0."""

    def __init__(self, place: NetworkPlace, seconds: float = MEETING_SECONDS) -> None:
        """Come to rank 0. NotMet if it is not there in time, or refuses this rank."""
        self.place = place
        self.patience = START_SECONDS
        self.address = ""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer: zmq.Socket[bytes] | None = None
        try:
            said = self._come(time.monotonic() + seconds, seconds)
        except NotMet:
            self.close()
            raise
        self.names = {int(rank): str(name) for rank, name in said["names"].items()}
        self.store_port = int(said["store"])
        self.beats = dealer(self._context, self.address)
        connect_among_equals(self.beats, endpoint(self.address, int(said["beats"])), place.keys)

    def receive(self, seconds: float) -> bytes | None:
        """Return the next message; None if there is none within `seconds`."""
        assert self._dealer is not None
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
        problem = ""
        look_up = 0.0
        while (now := time.monotonic()) < deadline:
            if now >= look_up:
                look_up = now + _RETRY_SECONDS
                problem = self._reach()
            if self._dealer is None:
                time.sleep(_GREETING_SECONDS)
                continue
            # A rank 0 that has ended meanwhile has not read the last one.
            with contextlib.suppress(zmq.Again):
                self._dealer.send(json.dumps(greeting).encode(), zmq.NOBLOCK)
            if self._dealer.poll(int(1000 * _GREETING_SECONDS)):
                said: dict[str, Any] = json.loads(self._dealer.recv())
                if "refused" in said:
                    raise NotMet(f"rank 0 refuses this rank: {said['refused']}")
                return said
        text = f"rank 0 has not come to {place.rendezvous}, or not all ranks have, in {seconds:.0f} s"
        raise NotMet(problem or text)

    def _reach(self) -> str:
        """Connect to where the rendezvous is now, if that is elsewhere. Returns why it cannot be looked up."""
        try:
            address, port = self.place.address()
        except NotMet as error:
            return str(error)
        if address != self.address:
            if self._dealer is not None:
                self._dealer.close(linger=0)
            self.address = address
            self._dealer = dealer(self._context, address)
            connect_among_equals(self._dealer, endpoint(address, port), self.place.keys)
        return ""


def router(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """Return a socket for an address, on which a message to a peer that is gone is an error."""
    made = context.socket(zmq.ROUTER)
    made.setsockopt(zmq.IPV6, int(":" in address))
    made.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return made


def dealer(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """Return a socket for an address, whose messages are for a peer that is there."""
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.IPV6, int(":" in address))
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
