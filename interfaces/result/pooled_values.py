"""The values of the texts of a one-shot request: rows of numbers, as many for each text as its task gives.

A vector or the labels of a text are one row. A task for each token gives one row a token, and sparse values one row
(token id, weight) a token id. Knows numbers; knows neither tasks nor requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from interfaces.wire.codec import I32
from interfaces.wire.equality import EqualByValue
from interfaces.wire.shared_memory import Shareable, SharedMemoryArray, mapped


@dataclass(eq=False)
class PooledValues(EqualByValue):
    """`values`, f32[rows, width], have the rows of all texts, one text after another, and `lengths` the rows of each.

    On the way from a worker the values may stand in shared memory; `array` gives them in either case. ValueError when
    the values contradict each other, also after a journey over the wire.
    """

    values: Shareable
    lengths: I32

    def __post_init__(self) -> None:
        if np.dtype(self.values.dtype) != np.float32 or len(self.values.shape) != 2:
            found = f"{np.dtype(self.values.dtype)} of shape {tuple(self.values.shape)}"
            raise ValueError(f"values must be a matrix of float32, got {found}")
        if len(self.lengths) and self.lengths.min() < 0:
            raise ValueError(f"lengths must be at least 0, got {int(self.lengths.min())}")
        total = int(self.lengths.sum(dtype=np.int64))
        if total != self.values.shape[0]:
            raise ValueError(f"lengths must add up to the {self.values.shape[0]} rows, got {total}")

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.lengths)

    @property
    def array(self) -> NDArray[np.float32]:
        """The values. Raises SharedMemoryError when their segment is gone."""
        array: NDArray[Any] = mapped(self.values)
        return array

    def take(self) -> Self:
        """Return these values as this process's own, and remove their segment. Raises SharedMemoryError."""
        if not isinstance(self.values, SharedMemoryArray):
            return self
        try:
            return type(self)(self.array, self.lengths)
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the segment of values that no process will read."""
        if isinstance(self.values, SharedMemoryArray):
            self.values.unlink()

    def texts(self) -> list[NDArray[np.float32]]:
        """Return the values of each text: views f32[rows, width]."""
        return np.split(self.array, np.cumsum(self.lengths)[:-1])

    def part(self, first: int, end: int) -> Self:
        """Return the values of the texts from `first` up to and without `end`: a view."""
        before = int(self.lengths[:first].sum())
        inside = slice(before, before + int(self.lengths[first:end].sum()))
        return type(self)(self.array[inside], self.lengths[first:end])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Join the values of one or more parts, in order."""
        if len(parts) == 1:
            return parts[0]
        values = np.concatenate([part.array for part in parts])
        return cls(values, np.concatenate([part.lengths for part in parts]))
