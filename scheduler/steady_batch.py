"""The decode batch that later steps repeat, and the bookkeeping of such a repetition.

While no sequence joins or leaves, a decode step is the step before with one more token for each row, and now and then
a block. How long that holds is known when it begins: until a row reaches its limit, or the table changes in another
way, which the table counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.blocks import BlockPool
from scheduler.rows import RowTable
from scheduler.sequence import Sequence


@dataclass(slots=True)
class SteadyBatch:
    """The rows of a decode step with everything about them that stays the same while steps repeat it."""

    # `RowTable.changes` for which the batch holds.
    changes: int
    rows: NDArray[np.int32]
    versions: NDArray[np.int64]
    block_size: int
    # Tokens for which each row has blocks.
    capacity: NDArray[np.int32]
    # Tokens that every row may get before one of them needs another block; below zero when one needs it now.
    room: int
    # Further steps that may repeat the batch.
    steps: int
    # Further results that cannot end a row by its limit.
    tokens: int
    sequences: list[Sequence | None]
    # Stop ids of all rows together.
    stops: frozenset[int]
    handles: NDArray[np.int32]
    # The replica that all rows belong to; None if there are several.
    replica: int | None
    active: NDArray[np.int8]
    # Whether no row has a grammar, which may give a row more tokens than it samples.
    free: bool
    row_bytes: bytes

    @classmethod
    def of(cls, table: RowTable, rows: NDArray[np.int32], block_size: int) -> SteadyBatch | None:
        """The batch of the step just sent, in which each of `rows` samples one token; None if it cannot repeat."""
        limit = table.limit[rows]
        replicas = table.replica[rows]
        known = table.num_tokens[rows]
        steps = int((limit - known).min())
        if steps < 1 or table.any_reports:
            return None
        first = int(replicas[0])
        sequences = [table.sequences[row] for row in rows.tolist()]
        capacity = table.num_blocks[rows] * block_size
        lengths = np.array([len(sequence.tokens) for sequence in sequences if sequence is not None])
        return cls(
            changes=table.changes,
            rows=rows,
            versions=table.version[rows],
            block_size=block_size,
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
        """Whether `rows` are the rows of the batch, with the same owners."""
        return self.changes == table.changes and rows.tobytes() == self.row_bytes

    def outlives(self, tokens: list[int]) -> bool:
        """Whether `tokens`, one for each row, end no row."""
        return self.tokens > 0 and self.stops.isdisjoint(tokens)

    def repeat(self, table: RowTable, most: int, pool: BlockPool, grow: Callable[[int], None]) -> int | None:
        """Update the columns for one more step and the repetitions that the worker does by itself.

        Returns the number of repetitions, at most `most`; None if the next step must be built anew. `grow` gives a row
        one block of `pool`. A repetition never reaches the limit of a row: the step that ends the repetitions must find
        something left to compute.
        """
        if self.changes != table.changes or self.steps < 1:
            return None
        if self.room < 0 and not self._make_room(table, 0, pool, grow):
            return None
        repeats = min(most, (self.steps - 1) // 2, self.block_size) if self.free else 0
        if repeats > self.room and not self._make_room(table, repeats, pool, grow):
            repeats = 0
        steps = 1 + repeats
        known = table.num_tokens[self.rows] + steps
        table.num_computed_tokens[self.rows] = known - 1
        table.num_tokens[self.rows] = known
        self.steps -= steps
        self.room -= steps
        return repeats

    def _make_room(self, table: RowTable, further: int, pool: BlockPool, grow: Callable[[int], None]) -> bool:
        """Give each row blocks for its tokens and `further` ones, at most one block each. False if there are too few.

        The rows get their blocks in the order of arrival.
        """
        known = table.num_tokens[self.rows]
        crossing = np.flatnonzero(known + further > self.capacity)
        if len(crossing) > pool.available:
            return False
        for place in crossing[np.argsort(table.order[self.rows[crossing]])].tolist():
            grow(int(self.rows[place]))
            self.capacity[place] += self.block_size
        self.changes = table.changes
        self.room = int((self.capacity - known).min())
        return True
