"""The connected API processes, and the handle by which each of them calls a request."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from interfaces import REGISTRATION_SIZE, Results, Vectors
from scheduler.sequence import Sequence

# Identity and number of the replica of a request that keeps running without a listener.
NO_REPLICA = b""
_NO_REPLICA_NUMBER = -1


@dataclass(slots=True)
class Replica:
    """An API process and its requests by handle."""

    # Its name in columns.
    number: int
    sequences: dict[int, Sequence] = field(default_factory=dict)
    # Number of its next results.
    next_results: int = field(init=False)
    # Whether it has said what it holds open; a request that it sent before that may come first.
    greeted: bool = False

    def __post_init__(self) -> None:
        self.next_results = self.number * REGISTRATION_SIZE


class Replicas:
    """Replicas by identity. Results of a sequence of `NO_REPLICA` are dropped."""

    def __init__(self) -> None:
        self._by_identity: dict[bytes, Replica] = {}
        self._identity_of: dict[int, bytes] = {}
        self._numbers = itertools.count()

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._by_identity

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._by_identity)

    def __getitem__(self, identity: bytes) -> Replica:
        return self._by_identity[identity]

    def get(self, identity: bytes) -> Replica | None:
        return self._by_identity.get(identity)

    def register(self, identity: bytes) -> Replica:
        """The replica of that identity, which is registered if it is new."""
        if identity not in self._by_identity:
            number = next(self._numbers)
            self._by_identity[identity] = Replica(number)
            self._identity_of[number] = identity
        return self._by_identity[identity]

    def greet(self, identity: bytes) -> bool:
        """Register a replica that says what it holds open. Returns whether it says so for the first time."""
        replica = self.register(identity)
        first = not replica.greeted
        replica.greeted = True
        return first

    def drop(self, identity: bytes) -> None:
        del self._identity_of[self._by_identity.pop(identity).number]

    def sequence(self, identity: bytes, handle: int) -> Sequence | None:
        replica = self._by_identity.get(identity)
        return replica.sequences.get(handle) if replica is not None else None

    def all_sequences(self) -> list[Sequence]:
        return [sequence for replica in self._by_identity.values() for sequence in replica.sequences.values()]

    def address(self, number: int, results: Results | Vectors) -> bytes | None:
        """Number the results or values for a replica. Returns its identity, or None if it is no longer connected."""
        identity = self._identity_of.get(number)
        if identity is not None:
            replica = self._by_identity[identity]
            results.number = replica.next_results
            replica.next_results += 1
        return identity

    def number_of(self, sequence: Sequence) -> int:
        replica = self._by_identity.get(sequence.replica)
        return _NO_REPLICA_NUMBER if replica is None else replica.number

    def release(self, sequence: Sequence) -> bool:
        """Unregister the sequence from its replica. Returns False if it was not registered."""
        if self.sequence(sequence.replica, sequence.handle) is not sequence:
            return False
        del self._by_identity[sequence.replica].sequences[sequence.handle]
        return True
