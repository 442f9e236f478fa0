"""Log-probabilities beyond those of the chosen tokens, as columns, on their way from a worker to an API process.

Knows the layout of the columns, and how to cut and join them; knows neither rows nor requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from interfaces.base.log_probabilities import LogProbabilities
from interfaces.wire.codec import F32, I32


@dataclass(frozen=True, slots=True)
class LogprobReports:
    """Log-probabilities as columns. Entry i is for the token at index `positions[i]` of the sequence `owners[i]`.

    An owner is a row from a worker, a handle from the scheduler. `chosen` is the token's own log-probability.

    An entry has the next `counts[i]` of `ids` and `values`: first its `tops[i]` most probable tokens, then the ids that
    the request named. A position inside the prompt is a report of the prompt.
    """

    owners: I32
    positions: I32
    chosen: F32
    tops: I32
    counts: I32
    ids: I32
    values: F32

    @property
    def consistent(self) -> bool:
        """Whether the columns fit together; bytes of a stranger may not."""
        entries = {len(column) for column in (self.owners, self.positions, self.chosen, self.tops, self.counts)}
        if len(entries) > 1 or not len(self.ids) == len(self.values) == int(self.counts.sum(dtype=np.int64)):
            return False
        return bool(((self.tops >= 0) & (self.tops <= self.counts)).all())

    def select(self, kept: NDArray[np.bool_]) -> Self:
        """Return the entries where `kept` holds."""
        if kept.all():
            return self
        within = np.repeat(kept, self.counts)
        columns = {name: getattr(self, name)[kept] for name in ("owners", "positions", "chosen", "tops", "counts")}
        return replace(self, **columns, ids=self.ids[within], values=self.values[within])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Join the entries of one or more parts, in order."""
        if len(parts) == 1:
            return parts[0]
        names = ("owners", "positions", "chosen", "tops", "counts", "ids", "values")
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    def entries(self) -> Iterator[tuple[int, int, LogProbabilities]]:
        """Yield (owner, position, report) one by one."""
        ids = self.ids.tolist()
        values = self.values.tolist()
        ends = np.cumsum(self.counts)
        columns = (self.owners, self.positions, self.chosen, self.tops, self.counts, ends)
        for owner, position, own, tops, count, end in zip(*(column.tolist() for column in columns), strict=True):
            middle = end - count + tops
            start = end - count
            top = dict(zip(ids[start:middle], values[start:middle], strict=True))
            asked = dict(zip(ids[middle:end], values[middle:end], strict=True))
            yield owner, position, LogProbabilities([own], [top], [asked])
