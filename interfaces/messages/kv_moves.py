"""Blocks of KV caches that move: beside the cache of their worker, or to another worker."""

from __future__ import annotations

from dataclasses import dataclass

from interfaces.wire.codec import F32, I32, message
from interfaces.wire.shared_memory import Shareable


@message(41)
@dataclass(slots=True)
class KvMoved:
    """Reports what a worker has done of `Step.save` and `Step.load`, in their order.

    The first `blocks[i]` blocks of ticket tickets[i] hold what their slots had; the next one, if there is one, could
    not be read. It took `seconds[i]`. The slots `skipped` were not written, for too much waits to be written, and
    `broken` ones cannot be used any more; `full`: the place has no room for slots that were never written.
    """

    incarnation: int
    epoch: int
    index: int
    tickets: I32
    blocks: I32
    seconds: F32
    skipped: I32
    broken: I32
    full: bool = False


@message(42)
@dataclass(frozen=True, slots=True)
class WorkerLeaves:
    """Says that a worker is asked to end: its sequences may go to others, with the K and V that they have here.

    It computes no more of them, and waits for its `Dismissal` as long as it hears something.
    """

    index: int
    epoch: int


@message(43)
@dataclass(frozen=True, slots=True)
class Dismissal:
    """Tells a worker that leaves that nothing is left to be sent: it may end."""

    epoch: int


@message(44)
@dataclass(slots=True)
class ShipKv:
    """Asks a worker for the bytes of some of its blocks. The answer is `KvPiece`, in the order of these."""

    incarnation: int
    epoch: int
    ticket: int
    blocks: I32


@message(45)
@dataclass(slots=True)
class KvPiece:
    """The bytes of the blocks that were asked for, one block after the other, as `WorkerHello.kv_form` says.

    They are in shared memory where both ends can read it, and its reader removes it. Empty: they cannot be had.
    """

    incarnation: int
    epoch: int
    index: int
    ticket: int
    data: Shareable


@message(46)
@dataclass(slots=True)
class TakeKv:
    """Fills blocks of a worker, which no row has yet, with these bytes. The answer is `KvTaken`."""

    incarnation: int
    epoch: int
    ticket: int
    blocks: I32
    data: Shareable


@message(47)
@dataclass(slots=True)
class KvTaken:
    """Reports that blocks hold what was sent; or that they do not, where not `whole`."""

    incarnation: int
    epoch: int
    index: int
    ticket: int
    whole: bool
