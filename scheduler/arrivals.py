"""Rows of one worker whose K and V lie on another one, which they have left: they wait until these have come.

A sequence whose worker leaves is placed elsewhere with what it has there, where that takes less time than to compute
it; both are measured (`copy_time.py`). Its blocks come in pieces, in their order (`shipping.py` has the messages). What
comes for another row is not sent again: a row may wait for that, too. What does not come is computed. Blocks that are
being filled stay owned until the worker has answered, whatever becomes of the row.
Knows rows and blocks of this worker, and numbers of blocks of others. Does not know requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from scheduler.blocks import BlockPool
from scheduler.copy_time import CopyTime
from scheduler.prefill_budget import PrefillBudget
from scheduler.rows import RowTable
from scheduler.sequence import KvElsewhere, Sequence

# Fewer blocks are computed: each piece waits for the steps in flight.
LEAST_BLOCKS = 2
# What takes longer than this is not waited for; nor what takes so many times as long as to compute it, and a second.
MOST_SECONDS = 10.0
MOST_TIMES = 2.0
_LEAST_PATIENCE = 1.0
# A row whose blocks have neither come nor failed to come by then looks for another place.
_LATE_SECONDS = 2 * MOST_SECONDS


@dataclass(eq=False, slots=True)
class Arrival:
    """Blocks of a row, from index `first` on, that get what blocks `theirs` of another worker hold.

    Then the K and V of `tokens` tokens are there. `version` is the row's. `seconds` is the time that it is expected to
    take, and `computing` that of computing them; after `patience` seconds it is not waited for any more. `asked` of the
    blocks were asked for, and `there` have come.
    """

    row: int
    version: int
    first: int
    tokens: int
    source: KvElsewhere
    theirs: list[int]
    blocks: list[int]
    began: float
    seconds: float | None
    computing: float | None
    patience: float
    asked: int = 0
    there: int = 0
    # Nothing more is asked for.
    cut: bool = False
    # What was asked for has not come, although its source is there.
    failed: bool = False


class Arrivals:
    """The arrivals under way, oldest first. Blocks have the form `kv_form`; nothing comes where that is empty."""

    def __init__(
        self,
        kv_form: str,
        block_size: int,
        pool: BlockPool,
        rows: RowTable,
        prefill_budget: PrefillBudget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.open: list[Arrival] = []
        # Blocks that have come until now.
        self.blocks = 0
        self._form = kv_form
        self._block_size = block_size
        self._pool = pool
        self._rows = rows
        self._prefill_budget = prefill_budget
        self._clock = clock
        self._copy_time = CopyTime(clock)

    def find(self, sequence: Sequence, first: int, awaited: Collection[tuple[int, int]] = ()) -> int:
        """How many blocks of a sequence, from index `first` on, are worth sending from where it was.

        It waits for the rows `awaited` in any case, each with its version.
        """
        elsewhere = sequence.elsewhere
        if elsewhere is None or not self._form or elsewhere.form != self._form:
            return 0
        if elsewhere.weights != sequence.weights:
            return 0
        count = -(-self._tokens(sequence, elsewhere) // self._block_size) - first
        ahead = self._under_way(awaited)
        computing = self._prefill_budget.block_seconds(self._block_size)
        return count if count >= LEAST_BLOCKS and self._copy_time.pays(count, ahead, computing) else 0

    def pays(self, blocks: int, elsewhere: PrefillBudget) -> bool:
        """Whether sending so many blocks takes less time than computing them, as far as is known.

        A worker that has computed no prompt yet is taken to be as fast as the one that has them.
        """
        here = self._prefill_budget.block_seconds(self._block_size)
        computing = elsewhere.block_seconds(self._block_size) if here is None else here
        return blocks >= LEAST_BLOCKS and self._copy_time.pays(blocks, self._under_way(), computing)

    def cost(self, blocks: int) -> int:
        """So many tokens could be computed in the time in which so many blocks come."""
        seconds = self._expected_seconds(blocks) if blocks else None
        computing = self._prefill_budget.token_seconds
        return int(seconds / computing) if seconds and computing else 0

    def expect(self, row: int, first: int, count: int, before: int = 0) -> None:
        """Hold `row` until `count` of its blocks from index `first` on have come. It waits for `before` others, too."""
        sequence = self._rows.sequence(row)
        elsewhere = sequence.elsewhere
        if elsewhere is None:
            raise ValueError(f"row {row} has nothing elsewhere")
        blocks = sequence.blocks[first : first + count]
        self._pool.share(blocks)
        tokens = min(self._tokens(sequence, elsewhere), (first + count) * self._block_size)
        computing = self._prefill_budget.block_seconds(self._block_size)
        # Without a copy it would compute what it waits for, too.
        instead = MOST_SECONDS if computing is None else MOST_TIMES * computing * (before + count)
        arrival = Arrival(
            row=row,
            version=int(self._rows.version[row]),
            first=first,
            tokens=tokens,
            source=elsewhere,
            theirs=elsewhere.blocks[first : first + count],
            blocks=blocks,
            began=self._clock(),
            seconds=self._expected_seconds(count),
            computing=None if computing is None else computing * count,
            patience=min(MOST_SECONDS, max(_LEAST_PATIENCE, instead)),
        )
        self.open.append(arrival)
        self._rows.awaited[row] = tokens

    def arrival_of(self, row: int) -> Arrival | None:
        """The arrival that a row waits for."""
        version = self._rows.version[row]
        return next((each for each in self.open if (each.row, each.version) == (row, version)), None)

    def brings(self, row: int, version: int, tokens: int) -> bool:
        """Whether the first `tokens` of a row of this version are on their way to it, or there."""
        owned = (each for each in self.open if (each.row, each.version) == (row, version))
        return any(tokens <= each.tokens and not each.cut for each in owned)

    def has_owner(self, arrival: Arrival) -> bool:
        """Whether the row still waits."""
        return bool(self._rows.version[arrival.row] == arrival.version)

    def takes_too_long(self, arrival: Arrival) -> bool:
        """Whether it is not waited for any more."""
        return self._clock() - arrival.began > arrival.patience

    def pays_on(self, arrival: Arrival) -> bool:
        """Whether it is right to wait on: it takes neither too long, nor longer than to compute the rest."""
        if self.takes_too_long(arrival):
            return False
        left = len(arrival.blocks) - arrival.asked
        computing = self._prefill_budget.block_seconds(self._block_size)
        one = self._copy_time.block_seconds
        return not arrival.there or not left or computing is None or one is None or one < computing

    def late(self) -> list[int]:
        """The rows that wait, although a worker should have answered long ago."""
        now = self._clock()
        return [each.row for each in self.open if self.has_owner(each) and now - each.began > _LATE_SECONDS]

    def learn(self, blocks: int, seconds: float) -> None:
        """Learn from a piece that has come."""
        self.blocks += blocks
        self._copy_time.learn(blocks, seconds)

    def learn_failure(self, arrival: Arrival, elsewhere: PrefillBudget) -> None:
        """Learn from an arrival that failed: as from a slow copy of what has not come.

        A worker that has computed no prompt yet is taken to be as fast as the one that was to send it.
        """
        here = self._prefill_budget.block_seconds(self._block_size)
        computing = elsewhere.block_seconds(self._block_size) if here is None else here
        self._copy_time.failed(len(arrival.blocks) - arrival.there, computing)

    def end(self, arrival: Arrival) -> int:
        """End an arrival. Returns how many tokens of its sequence have their K and V now."""
        self.open.remove(arrival)
        self._pool.release(arrival.blocks)
        return min(arrival.tokens, (arrival.first + arrival.there) * self._block_size)

    @staticmethod
    def _tokens(sequence: Sequence, elsewhere: KvElsewhere) -> int:
        return min(elsewhere.tokens, sequence.reusable)

    def _expected_seconds(self, blocks: int) -> float | None:
        """The time until so many more blocks are here, behind those under way; None while nothing is measured."""
        one = self._copy_time.block_seconds
        return None if one is None else one * (blocks + self._under_way())

    def _under_way(self, apart: Collection[tuple[int, int]] = ()) -> int:
        """Blocks that are still to come, but for those of some rows."""
        counted = (each for each in self.open if (each.row, each.version) not in apart)
        return sum(len(each.blocks) - each.there for each in counted)
