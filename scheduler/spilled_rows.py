"""Rows of one worker whose beginning lies beside its KV cache: they wait until it is loaded.

`spill.py` knows what is where. Here are the rows that get it, and the blocks that it fills, which stay owned until the
worker has answered, whatever becomes of the row. Knows rows, blocks and hashes. Does not know requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from interfaces import KvMoved
from scheduler.blocks import BlockPool
from scheduler.prefill_budget import PrefillBudget
from scheduler.rows import RowTable
from scheduler.spill import Load, Spill


class SpilledRows:
    """`slots` places for blocks of `block_size` tokens; none if 0."""

    def __init__(
        self,
        slots: int,
        block_size: int,
        pool: BlockPool,
        rows: RowTable,
        prefill_budget: PrefillBudget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spill = Spill(slots, clock)
        self._block_size = block_size
        self._pool = pool
        self._rows = rows
        self._prefill_budget = prefill_budget
        if slots:
            pool.on_reuse = lambda block, digest: self.spill.save(block, digest, self._computing)

    def find(self, hashes: Iterable[bytes]) -> list[bytes]:
        """The longest beginning of `hashes` whose blocks are worth loading."""
        return self.spill.match(hashes, self._computing) if self.spill.slots else []

    def cost(self, blocks: int) -> int:
        """So many tokens could be computed in the time in which so many blocks are loaded."""
        seconds = self.spill.expected_seconds(blocks) if blocks else None
        computing = self._prefill_budget.token_seconds
        return int(seconds / computing) if seconds and computing else 0

    def load(self, row: int, first: int, slots: Sequence[int]) -> None:
        """Hold `row` until its blocks from index `first` on have what lies in these slots, which are held."""
        blocks = self._rows.sequence(row).blocks[first : first + len(slots)]
        self._pool.share(blocks)
        self.spill.load(row, int(self._rows.version[row]), first, blocks, list(slots), self._computing)
        self._rows.awaited[row] = (first + len(slots)) * self._block_size

    def load_of(self, row: int) -> Load | None:
        """The load that a row waits for."""
        version = self._rows.version[row]
        return next((load for load in self.spill.loads() if (load.row, load.version) == (row, version)), None)

    def moved(self, message: KvMoved) -> list[tuple[Load, int, float]]:
        """Take a report. Returns the loads whose rows still wait, with the blocks that are there, and the seconds.

        ValueError for a report that fits no order.
        """
        waiting = []
        for load, count, seconds in self.spill.answered(message):
            if self._rows.version[load.row] == load.version and self._rows.awaited[load.row]:
                waiting.append((load, count, seconds))
            self._pool.release(load.blocks)
        return waiting

    @property
    def any_waits(self) -> bool:
        """Whether any row waits for a load."""
        return self.spill.any_loads

    def late(self) -> list[int]:
        """The rows that wait for loads, if these take too long."""
        if not self.spill.late:
            return []
        return [load.row for load in self.spill.loads() if self._rows.version[load.row] == load.version]

    @property
    def _computing(self) -> float | None:
        """The measured time of computing a block of a prompt."""
        return self._prefill_budget.block_seconds(self._block_size)
