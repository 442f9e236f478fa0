"""What ties a rank to the others: lines for messages, sums of tensors, and a watch over those that are lost.

Ranks on CPUs of one host share memory, whose exchange watches by itself. On GPUs of one host NCCL adds, and on several
hosts gloo or NCCL, and a thread watches. Knows which of these belong together. Does not know models.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from model_worker.agreement import Agreed
from model_worker.model import first_line
from model_worker.tensor_parallel.beats import SILENCE_SECONDS, NetworkMates
from model_worker.tensor_parallel.collectives import Collectives, NetworkCollectives
from model_worker.tensor_parallel.exchange import START_SECONDS, Exchange, GroupLost, NotMet
from model_worker.tensor_parallel.interface import use_interface_to
from model_worker.tensor_parallel.links import MEETING_SECONDS, Follower, Leader, Place
from model_worker.tensor_parallel.load import agreement
from model_worker.tensor_parallel.network import NetworkFollower, NetworkLeader, NetworkPlace, endpoint
from model_worker.tensor_parallel.shard import Joining
from model_worker.tensor_parallel.steps import Standing, Steps, steps_on
from model_worker.tensor_parallel.watch import Watch, end_process

# Bytes of a slot of the exchange: a piece of a larger tensor stays in a core's cache.
_SLOT_BYTES = 1 << 20
# Seconds in which the watch names the rank with which a sum has failed: rank 0 may tell the others some seconds later.
_NAMING_SECONDS = SILENCE_SECONDS + 4.0


class SendingLine(Protocol):
    """Rank 0's lines to the others."""

    patience: float

    def send(self, message: bytes | bytearray) -> None: ...


class ReceivingLine(Protocol):
    """Another rank's line to rank 0."""

    patience: float

    def receive(self, seconds: float) -> bytes | None: ...


@dataclass
class Ties:
    """A rank's ties to the others. `joining` joins the tensors of layers, on a GPU its own and else the host's.

    `apart` joins by torch.distributed, without a memory that all ranks have. `trouble` says which rank has ended;
    None if none has.
    """

    device: torch.device
    joining: Joining
    agreed: Agreed
    trouble: Callable[[], GroupLost | None]
    apart: Collectives | None = None
    watch: Watch | None = None
    mates: NetworkMates | None = None

    @property
    def giving(self) -> Collectives | None:
        """What gives the columns of a batch from device to device; on a CPU they go as bytes."""
        return self.apart if self.device.type == "cuda" else None

    @property
    def steps(self) -> Steps | None:
        """The counter of this rank's steps, where a thread watches them."""
        return None if self.watch is None else self.watch.steps

    def serve(self, line: SendingLine | ReceivingLine, patience: float) -> None:
        """The start is over: from now on the slowest rank may be awaited for so many seconds."""
        if self.mates is not None:
            # A link that is cut is noticed before its rank is taken for one that hangs.
            patience = max(patience, SILENCE_SECONDS + 1.0)
        line.patience = patience
        if self.watch is not None:
            self.watch.patience = patience
        if self.mates is not None:
            self.mates.silence = SILENCE_SECONDS

    def leave(self) -> None:
        """This rank was asked to end, and goes on until rank 0 has ended: tell it, if it is on another host."""
        if self.mates is not None and self.watch is not None:
            self.watch.leave()

    def finish(self, story: str = "", blamed: bool = False) -> None:
        """This rank ends now: tell the others why, if they are on other hosts."""
        if self.mates is not None and self.watch is not None:
            self.watch.finish(story, blamed)


def lead_here(place: Place, device: torch.device) -> tuple[Leader, Ties]:
    """Wait for the other ranks, which are on this host."""
    _meeting(place).unlink(missing_ok=True)
    leader = Leader(place, _SLOT_BYTES)
    return leader, _tied_here(place, device, leader.exchange, leader.trouble)


def follow_here(place: Place, device: torch.device) -> tuple[Follower, Ties]:
    """Come to rank 0, which is on this host."""
    follower = Follower(place)
    return follower, _tied_here(place, device, follower.exchange, lambda: "")


def lead_hosts(place: NetworkPlace, device: torch.device) -> tuple[NetworkLeader, Ties]:
    """Wait for the other ranks, which are on any host."""
    leader = NetworkLeader(place)
    limit = timedelta(seconds=START_SECONDS)
    store = TCPStore(leader.address, 0, place.ranks, True, limit, wait_for_workers=False)
    leader.meet(store.port)
    mates = NetworkMates(leader.beats, 0, leader.names)
    return leader, _tied_over_hosts(place, device, lambda: store, mates, leader.address)


def follow_hosts(place: NetworkPlace, device: torch.device) -> tuple[NetworkFollower, Ties]:
    """Come to rank 0, which is on any host."""
    follower = NetworkFollower(place)
    mates = NetworkMates(follower.beats, place.rank, follower.names)
    store = partial(_store_of, follower)
    return follower, _tied_over_hosts(place, device, store, mates, follower.address)


def _store_of(follower: NetworkFollower) -> Store:
    """Reach the store of rank 0. NotMet names its port."""
    limit = timedelta(seconds=MEETING_SECONDS)
    try:
        store = TCPStore(follower.address, follower.store_port, follower.place.ranks, False, limit)
    except RuntimeError as error:
        where = endpoint(follower.address, follower.store_port)
        text = f"rank 0 listens at {where}, a port that is another one at each start, and is not reached there"
        raise NotMet(f"{text} (is a firewall in between?): {first_line(error)}") from None
    store.set_timeout(timedelta(seconds=START_SECONDS))
    return store


class SharedMates:
    """The ranks of one host, which see each other's numbers in memory. Their supervisor sees which have ended."""

    parting = "", False
    blamed = True

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def swap(self, own: Standing, waited: float) -> Sequence[Standing]:
        self._exchange.write_steps(own.begun, own.ended)
        if self._exchange.rank:
            return []
        return [Standing(*self._exchange.read_steps(rank)) for rank in range(self._exchange.ranks)]

    def lost(self) -> str:
        return ""

    def name(self, rank: int) -> str:
        return self._exchange.name(rank)


def _tied_here(place: Place, device: torch.device, exchange: Exchange, trouble: Callable[[], str]) -> Ties:
    agreed = agreement(exchange, place.ranks)
    if device.type == "cpu":
        return Ties(device, exchange, agreed, lambda: _loss(trouble(), True))
    joined = Collectives(place.rank, place.ranks, device, _meeting(place))
    watch = Watch(steps_on(device), SharedMates(exchange), end_process, _wake)
    watch.start()
    return Ties(device, joined, agreed, lambda: _loss(watch.story or trouble(), True), joined, watch)


def _tied_over_hosts(
    place: NetworkPlace, device: torch.device, store: Callable[[], Store], mates: NetworkMates, address: str
) -> Ties:
    """Join the ranks. The watch begins first: rank 0 may end before another one has reached its `store`."""
    use_interface_to(address, 1)
    counts: list[Callable[[], tuple[int, int]]] = []
    steps = steps_on(device, lambda: counts[0]() if counts else (0, 0))
    watch = Watch(steps, mates, end_process, _wake)
    watch.start()
    joined = NetworkCollectives(place.rank, place.ranks, device, store(), partial(_explain, watch))
    counts.append(joined.counts)
    trouble = partial(_found, watch)
    return Ties(device, joined, agreement(joined, place.ranks), trouble, joined, watch, mates)


def _explain(watch: Watch) -> GroupLost | None:
    """Say which rank is lost, as soon as the watch knows."""
    deadline = time.monotonic() + _NAMING_SECONDS
    while not watch.story and time.monotonic() < deadline:
        time.sleep(0.05)
    return _found(watch)


def _found(watch: Watch) -> GroupLost | None:
    return _loss(watch.story, watch.blamed)


def _loss(story: str, blamed: bool) -> GroupLost | None:
    return GroupLost(story, blamed) if story else None


def _wake() -> None:
    """End the main thread's loop, if it is there already: it says to the scheduler why this worker ends."""
    if signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, signal.SIG_DFL, signal.SIG_IGN):
        os.kill(os.getpid(), signal.SIGINT)


def _meeting(place: Place) -> Path:
    """Return the file at which torch.distributed meets, in a folder that is this user's."""
    return place.path.with_suffix(f".{place.epoch}.meeting")
