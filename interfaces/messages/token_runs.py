"""Several tokens of a row after its sampled one, on their way from a worker to the scheduler.

They are jump-forward tokens, about which a grammar leaves no choice, or guesses that were right. Knows the layout of
the columns; knows neither grammars nor requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from interfaces.wire.codec import I32


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """Row `rows[i]` goes on, after its sampled token, with the next `counts[i]` of `tokens`."""

    rows: I32
    counts: I32
    tokens: I32

    @classmethod
    def of(cls, runs: Mapping[int, Sequence[int] | NDArray[np.int32]]) -> TokenRuns:
        """Make the columns from the tokens of each row, none of them empty."""
        counts = np.array([len(run) for run in runs.values()], np.int32)
        return cls(np.array(list(runs), np.int32), counts, np.concatenate([*runs.values()]).astype(np.int32))

    @property
    def consistent(self) -> bool:
        """Whether the columns fit together; bytes of a stranger may not."""
        few = len(self.counts) and self.counts.min() < 1
        return len(self.rows) == len(self.counts) and not few and int(self.counts.sum()) == len(self.tokens)

    def runs(self) -> dict[int, NDArray[np.int32]]:
        """Return the tokens of each row."""
        parts = np.split(self.tokens, np.cumsum(self.counts)[:-1])
        return dict(zip(self.rows.tolist(), parts, strict=True))
