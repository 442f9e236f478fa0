"""Hidden states of tokens (the last norm's output, from which logits are made), from a worker to an API process.

Knows the layout of the columns, and how to cut and join them; knows neither rows nor requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from interfaces.wire.codec import F32, I32


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states as columns. Entry i is for the token at index `positions[i]` of the sequence `owners[i]`.

    An owner is a row from a worker, a handle from the scheduler. `values` has the vectors one after the other, all of
    one width.
    """

    owners: I32
    positions: I32
    values: F32

    @property
    def consistent(self) -> bool:
        """Whether the columns fit together; bytes of a stranger may not."""
        count = len(self.owners)
        return count > 0 and len(self.positions) == count and len(self.values) % count == 0

    @property
    def vectors(self) -> NDArray[np.float32]:
        """The vectors, one row an entry: f32[entries, width]."""
        return self.values.reshape(len(self.owners), -1)

    def select(self, kept: NDArray[np.bool_]) -> Self:
        """Return the entries where `kept` holds."""
        if kept.all():
            return self
        return type(self)(self.owners[kept], self.positions[kept], self.vectors[kept].ravel())

    def owned_by(self, owners: NDArray[np.int32]) -> Self:
        """Return these entries under other owners."""
        return type(self)(owners, self.positions, self.values)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Join the entries of one or more parts, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def entries(self) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
        """Yield (owner, position, vector) one by one."""
        yield from zip(self.owners.tolist(), self.positions.tolist(), self.vectors, strict=True)
