"""The API processes that are connected, and which request each of them calls by which handle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from interfaces.messages import REGISTRATION_SIZE, Results
from scheduler.sequence import Sequence

NO_REPLICA = b""
_NO_REPLICA_NUMBER = -1


@dataclass(slots=True)
class Replica:
    """An API process and its requests by handle. `number` is its name in columns; `told` counts its results."""

    number: int
    sequences: dict[int, Sequence] = field(default_factory=dict)
    published: int = field(init=False)

    def __post_init__(self) -> None:
        self.published = self.number * REGISTRATION_SIZE


class Replicas:
    """By identity. A sequence of `NO_REPLICA` goes on while nobody listens: its news are for no replica."""

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
        """The replica of that identity, known from now on."""
        if identity not in self._by_identity:
            number = next(self._numbers)
            self._by_identity[identity] = Replica(number)
            self._identity_of[number] = identity
        return self._by_identity[identity]

    def drop(self, identity: bytes) -> None:
        del self._identity_of[self._by_identity.pop(identity).number]

    def sequence(self, identity: bytes, handle: int) -> Sequence | None:
        replica = self._by_identity.get(identity)
        return replica.sequences.get(handle) if replica is not None else None

    def all_sequences(self) -> list[Sequence]:
        return [sequence for replica in self._by_identity.values() for sequence in replica.sequences.values()]

    def address(self, number: int, results: Results) -> bytes | None:
        """Numbers what is sent to a replica, and says where it goes; None when the replica is not there any more."""
        identity = self._identity_of.get(number)
        if identity is not None:
            replica = self._by_identity[identity]
            results.number = replica.published
            replica.published += 1
        return identity

    def number_of(self, sequence: Sequence) -> int:
        replica = self._by_identity.get(sequence.replica)
        return _NO_REPLICA_NUMBER if replica is None else replica.number

    def release(self, sequence: Sequence) -> bool:
        """Its replica does not know it any more; whether one did."""
        if self.sequence(sequence.replica, sequence.handle) is not sequence:
            return False
        del self._by_identity[sequence.replica].sequences[sequence.handle]
        return True
