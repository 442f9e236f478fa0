"""Blocks of one worker that its rows are about to fill, and the rows that wait for them.

A sequence whose beginning is being computed for another row shares that row's blocks at once, and runs when the steps
that fill them are sent: a worker runs its steps in order. So one of many equal prompts is computed, not each of them.
Blocks that come for another row from elsewhere are shared alike.
Knows rows, blocks and hashes. Does not know tokens or requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.rows import RowTable


class Fill(NamedTuple):
    """A block that a row fills once `tokens` of its tokens are computed. `version` is the row's, as in `RowTable`."""

    block: int
    row: int
    version: int
    tokens: int


class PrefixWaits:
    """The blocks to be filled, by hash, and what each waiting row waits for."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._fills: dict[bytes, Fill] = {}
        self._digests: dict[int, list[bytes]] = {}
        self._waits: dict[int, list[Fill]] = {}

    def find(self, hashes: Iterable[bytes]) -> list[Fill]:
        """The blocks for the longest beginning of `hashes` that rows fill or have filled."""
        found: list[Fill] = []
        for digest in hashes:
            fill = self._fills.get(digest)
            if fill is None:
                break
            found.append(fill)
        return found

    def announce(self, row: int, blocks: Sequence[int], hashes: Sequence[bytes], first: int, block_size: int) -> None:
        """Offer the blocks of `row` from index `first` on, as far as they have hashes.

        The first row that offers a block under a hash is the one that is found.
        """
        version = int(self._table.version[row])
        offered = []
        for index in range(first, min(len(blocks), len(hashes))):
            if hashes[index] not in self._fills:
                self._fills[hashes[index]] = Fill(blocks[index], row, version, (index + 1) * block_size)
                offered.append(hashes[index])
        if offered:
            self._digests[row] = offered

    def wait(self, row: int, fills: Sequence[Fill], tokens: int) -> None:
        """Hold `row` until `fills` are filled; then its first `tokens` need no computing."""
        # A row fills its blocks in order, so the last one of each row says all.
        self._waits[row] = list({fill.row: fill for fill in fills}.values())
        self._table.awaited[row] = tokens

    @property
    def any_waits(self) -> bool:
        """Whether any row waits."""
        return bool(self._waits)

    def has(self, row: int) -> bool:
        """Whether a row waits."""
        return row in self._waits

    def settle(self) -> list[int]:
        """The rows that wait no longer: their blocks are filled by the steps that were sent, or have come."""
        filled = [row for row, fills in self._waits.items() if all(map(self._is_filled, fills))]
        for row in filled:
            del self._waits[row]
        return filled

    def oldest_waiting(self) -> dict[int, int]:
        """The rows that others wait for, each with the least order of these."""
        found: dict[int, int] = {}
        for row, fills in self._waits.items():
            order = int(self._table.order[row])
            for fill in fills:
                found[fill.row] = min(order, found.get(fill.row, order))
        return found

    def ages(self, rows: NDArray[np.int32]) -> NDArray[np.int64]:
        """The order of each row, or that of the oldest row that waits for what it computes."""
        order: NDArray[np.int64] = self._table.order[rows]
        for row, oldest in self.oldest_waiting().items():
            order[rows == row] = np.minimum(order[rows == row], oldest)
        return order

    def orphans(self) -> list[int]:
        """Rows that wait for blocks of a row that has ended before it filled them."""
        version = self._table.version
        return [row for row, fills in self._waits.items() if any(version[f.row] != f.version for f in fills)]

    def forget(self, row: int) -> None:
        """Drop what `row` offers and what it waits for."""
        self._waits.pop(row, None)
        self._table.awaited[row] = 0
        for digest in self._digests.pop(row, ()):
            del self._fills[digest]

    def _is_filled(self, fill: Fill) -> bool:
        table = self._table
        return bool(table.version[fill.row] == fill.version and table.num_computed_tokens[fill.row] >= fill.tokens)
