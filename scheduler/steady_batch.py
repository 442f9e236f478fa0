"""The rows of a step that the next steps repeat: what need not be found anew while nobody comes or goes.

In decode most steps are the step before with one token more for each row, and now and then a block. How long that holds
is known when it begins: until a row comes to its limit, or something changes the table in another way, which it counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.rows import RowTable
from scheduler.sequence import Sequence


@dataclass(slots=True)
class SteadyBatch:
    """`steps` more steps may repeat it, and `tokens` more results cannot end a row by its limit.

    `capacity` is the tokens that each row has blocks for, `room` how many more each may get before one of them needs
    another block (below zero: one needs it now), `stops` the stop ids of any row; `replica` is the one that
    all rows are for, or None. `free` says that no row has a grammar, which may give it more tokens than it samples.
    """

    changes: int
    rows: NDArray[np.int32]
    versions: NDArray[np.int64]
    capacity: NDArray[np.int32]
    room: int
    steps: int
    tokens: int
    sequences: list[Sequence | None]
    stops: frozenset[int]
    handles: NDArray[np.int32]
    replica: int | None
    active: NDArray[np.int8]
    free: bool
    row_bytes: bytes

    @classmethod
    def of(cls, table: RowTable, rows: NDArray[np.int32], block_size: int) -> SteadyBatch | None:
        """After a step of these rows was booked as sent, in which each got one token and sampled."""
        limit, replicas, known = table.limit[rows], table.replica[rows], table.num_tokens[rows]
        steps = int((limit - known).min())
        if steps < 1 or table.any_reports:
            return None
        first, sequences = int(replicas[0]), [table.sequences[row] for row in rows.tolist()]
        capacity = table.num_blocks[rows] * block_size
        lengths = np.array([len(sequence.tokens) for sequence in sequences if sequence is not None])
        return cls(
            changes=table.changes,
            rows=rows,
            versions=table.version[rows],
            capacity=capacity,
            room=int((capacity - known).min()),
            steps=steps,
            tokens=int((limit - lengths).min()) - 1,
            sequences=sequences,
            stops=frozenset(table.stop_ids[rows].ravel().tolist()),
            handles=table.handle[rows],
            replica=first if (replicas == first).all() else None,
            active=np.zeros(len(rows), np.int8),
            free=not table.any_grammar,
            row_bytes=rows.tobytes(),
        )

    def holds(self, table: RowTable, rows: NDArray[np.int32]) -> bool:
        """Whether these are its rows, and whose they were."""
        return self.changes == table.changes and rows.tobytes() == self.row_bytes

    def outlives(self, tokens: list[int]) -> bool:
        """Whether these tokens, one of each row, end none of them."""
        return self.tokens > 0 and self.stops.isdisjoint(tokens)
