"""What changes in the rows of one worker with its next step: rows that join or are dropped, and blocks that they get.

Rows that wait for their beginning join when it is there. Knows rows and blocks. Does not know what a step computes.
"""

from __future__ import annotations

from scheduler.rows import RowTable
from scheduler.sequence import Sequence


class RowChanges:
    """The changes that the worker has not been sent."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        # Sequences that the worker has not been sent.
        self.joined: list[Sequence] = []
        self._dropped: list[int] = []
        # Row, index in its table, and block.
        self._new_blocks: list[tuple[int, int, int]] = []

    @property
    def joining(self) -> list[Sequence]:
        """The sequences that the next step introduces."""
        return [sequence for sequence in self.joined if not self._rows.awaited[sequence.row]]

    def join(self, sequence: Sequence) -> None:
        """A sequence was given a row, with blocks."""
        self.joined.append(sequence)
        self._new_blocks += [(sequence.row, index, block) for index, block in enumerate(sequence.blocks)]

    def grow(self, row: int, index: int, block: int) -> None:
        """A row was given one more block."""
        self._new_blocks.append((row, index, block))

    def leave(self, row: int, sequence: Sequence) -> None:
        """A sequence was taken off its row."""
        if sequence in self.joined:
            # The worker was never sent this row: there is nothing to drop.
            self.joined.remove(sequence)
        else:
            self._dropped.append(row)
        self._new_blocks = [entry for entry in self._new_blocks if entry[0] != row]

    def take(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Rows to drop and new blocks since the last step, for the step that is sent now."""
        held = self._rows.awaited > 0
        changes = self._dropped, [entry for entry in self._new_blocks if not held[entry[0]]]
        self._dropped = []
        self.joined = [sequence for sequence in self.joined if held[sequence.row]]
        self._new_blocks = [entry for entry in self._new_blocks if held[entry[0]]]
        return changes
