"""The ranks of a group on several hosts as they hear each other: numbers of steps twice a second, over tcp.

Rank 0 hears all others, and each of them hears rank 0. A rank that ends says why, if it can. Knows sockets and numbers.
Does not know what is computed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple

import zmq

from model_worker.tensor_parallel.steps import Standing

# Seconds without a word after which a rank is lost. While ranks start, reading weights may hold their interpreters.
SILENCE_SECONDS = 4.0
SILENCE_AT_START = 30.0
# Characters of the reason that a rank gives for its end.
_LONGEST_STORY = 999


class NetworkMates:
    """The ranks by their numbers, on this rank's socket. `names` are for people."""

    def __init__(self, beats: zmq.Socket[bytes], rank: int, names: Mapping[int, str]) -> None:
        self.silence = SILENCE_AT_START
        self._socket = beats
        # Rank 0 has a router, and the others a connection to it.
        self._rank = rank
        self._names = names
        self._standings = [Standing()] * len(names)
        self._silent = {other: 0.0 for other in (names if rank == 0 else [0]) if other != rank}
        self._identities: dict[int, bytes] = {}
        # The ranks that end, each with the reason and whether what they compute may be that.
        self._parted: dict[int, tuple[str, bool]] = {}
        self.parting = "", False

    @property
    def blamed(self) -> bool:
        """Whether what is computed may be the reason of the loss: not of a silence, nor of an end by order."""
        return any(blamed for _, blamed in self._parted.values())

    def swap(self, own: Standing, waited: float) -> Sequence[Standing]:
        """Tell the others how far this rank is, and hear them. Returns all ranks' on rank 0, and none on others."""
        self._standings[self._rank] = own
        for rank in self._silent:
            self._silent[rank] += waited
        while self._socket.poll(0):
            parts = self._socket.recv_multipart()
            identity, message = parts[:-1], parts[-1]
            with contextlib.suppress(ValueError, TypeError, KeyError, IndexError):
                self._hear(message, identity)
        text = json.dumps([self._rank, *astuple(own), *self.parting]).encode()
        with contextlib.suppress(zmq.ZMQError):  # the silence of one that is gone is noticed
            if self._rank:
                self._socket.send(text, zmq.NOBLOCK)
        for other in self._identities.values():
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart([other, text], zmq.NOBLOCK)
        return self._standings.copy() if self._rank == 0 else []

    def lost(self) -> str:
        """Say which rank ends, with its reason, or is not heard; empty if all are there."""
        if self._parted:
            return "; ".join(f"{self._names[rank]} ends: {why}" for rank, (why, _) in self._parted.items())
        silent = [rank for rank, seconds in self._silent.items() if seconds > self.silence]
        names = ", ".join(self._names[rank] for rank in silent)
        story = f"{names} is not heard for {self.silence:.0f} s: it was ended or stopped, or the link is cut"
        return story if names else ""

    def name(self, rank: int) -> str:
        """Name a rank for people."""
        return self._names[rank]

    def _hear(self, message: bytes, identity: Sequence[bytes]) -> None:
        rank, *said, story, blamed = json.loads(message)
        numbers = [int(number) for number in said]
        if rank not in self._silent:
            return
        if story:
            self._parted[rank] = str(story)[:_LONGEST_STORY], bool(blamed)
        self._silent[rank] = 0.0
        self._standings[rank] = Standing(*numbers)
        if identity:
            self._identities[rank] = identity[0]
