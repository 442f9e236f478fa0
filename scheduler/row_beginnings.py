"""Where the rows of one worker begin: which of their tokens need no computing there, and what they wait for meanwhile.

The beginning of a sequence lies in the worker's prefix cache, or another row is filling it, or it lies beside the KV
cache, or on a worker that the sequence has left. What another row is being sent is not sent once more, so rows with one
beginning get that once, and each its own end. Whatever a row begins with and computes is put into the prefix cache.
Knows rows, blocks and hashes. Does not know steps, nor other workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

from interfaces import KvMoved, WorkerHello
from scheduler.arrivals import Arrival, Arrivals
from scheduler.blocks import BlockPool
from scheduler.image_rows import ImageRows
from scheduler.kv_log import KvLog
from scheduler.limits import MIN_AWAITED_TOKENS
from scheduler.prefill_budget import PrefillBudget
from scheduler.prefix_waits import Fill, PrefixWaits
from scheduler.rows import RowTable
from scheduler.sequence import Sequence
from scheduler.spill import Load
from scheduler.spilled_rows import SpilledRows

# Tokens in each piece of the prompt of a row that runs alone, rounded up to whole blocks.
FIXED_TOKENS = 64


class Beginning(NamedTuple):
    """The blocks that a sequence begins with, in their order.

    First the `shared` ones of the prefix cache, then those that rows fill, then so many that are `coming` from another
    worker, or those that are loaded, by their digests in `spilled`.
    """

    shared: list[int]
    fills: list[Fill]
    coming: int
    spilled: list[bytes]

    @property
    def owned(self) -> list[int]:
        """The blocks that are shared with other rows, or with none yet."""
        return self.shared + [fill.block for fill in self.fills]


class RowBeginnings:
    """The beginnings of the rows of `rows`, whose blocks are those of `pool`."""

    def __init__(
        self,
        hello: WorkerHello,
        prefix_cache: bool,
        rows: RowTable,
        pool: BlockPool,
        images: ImageRows,
        prefill_budget: PrefillBudget,
        min_awaited_tokens: int = MIN_AWAITED_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hello = hello
        prefix_cache = prefix_cache and hello.reuses_prefixes
        self._prefix_cache = prefix_cache
        self._rows = rows
        self._pool = pool
        self._images = images
        self._min_awaited_tokens = min_awaited_tokens
        self._size = hello.block_size
        shape = hello.block_size, pool, rows, prefill_budget, clock
        # Rows whose K and V come from beside the KV cache, from other workers, and from other rows.
        self.spilled_rows = SpilledRows(hello.spill_slots if prefix_cache else 0, *shape)
        self.arrivals = Arrivals(hello.kv_form, *shape)
        self.prefix_waits = PrefixWaits(rows)
        # The changes of the prefix cache, where they are published.
        self.kv_log: KvLog | None = None
        # Tokens of the sequences that were placed here, and those of them that were not computed again.
        self.placed_tokens = 0
        self.saved_tokens = 0

    @property
    def fixed_tokens(self) -> int:
        """Length of the pieces of the prompt of a row that runs alone."""
        return -(-FIXED_TOKENS // self._size) * self._size

    @property
    def any_waits(self) -> bool:
        """Whether a row waits for its beginning."""
        return bool(self.arrivals.open) or self.prefix_waits.any_waits or self.spilled_rows.any_waits

    def runs_alone(self, sequence: Sequence) -> bool:
        """Whether a sequence shares no forward pass here, so that its bits depend on no other."""
        return sequence.scheduling.deterministic and not self._hello.row_invariant

    def match_tokens(self, sequence: Sequence) -> tuple[int, int]:
        """Number of tokens of a waiting sequence that need no computing here, if it is placed now.

        Those that are loaded for it, or sent from where it was, are among them. The second number says what that costs:
        so many tokens could be computed in the same time.
        """
        found = self.find(sequence)
        blocks = len(found.owned) + found.coming + len(found.spilled)
        cost = self.arrivals.cost(found.coming) + self.spilled_rows.cost(len(found.spilled))
        return blocks * self._size, cost

    def find(self, sequence: Sequence) -> Beginning:
        """What a waiting sequence would begin with, if it were placed now."""
        # It is asked for each worker: what is the same in all lookups is looked up once.
        hashes = self._hashes(sequence)[: sequence.reusable // self._size] if self._prefix_cache else []
        shared = self._match(sequence, hashes)
        fills = self._fills(sequence, hashes[len(shared) :])
        sent = [] if sequence.elsewhere is None else self._sent(fills)
        coming = self._coming(sequence, len(shared), sent)
        if coming:
            fills = sent
        spilled = [] if coming or fills else self._spilled(sequence, hashes[len(shared) :])
        return Beginning(shared, fills, coming, spilled)

    def give_blocks(self, sequence: Sequence, found: Beginning, fresh: int) -> list[int]:
        """Give a sequence the blocks that it begins with, and `fresh` new ones. Returns the slots that it loads."""
        self._pool.share(found.owned)
        # They are held before others are saved, which may want their slots.
        slots = self.spilled_rows.spill.hold(found.spilled)
        sequence.blocks = found.owned + self._pool.allocate(fresh)
        return slots

    def begin(self, row: int, found: Beginning, slots: list[int]) -> None:
        """Let a row that was given these blocks run, or wait for what is not there yet."""
        sequence = self._rows.sequence(row)
        cached = len(found.shared)
        if found.fills:
            self.prefix_waits.wait(row, found.fills, len(found.owned) * self._size)
        if found.coming:
            self.arrivals.expect(row, len(found.owned), found.coming, before=len(found.fills))
        elif found.spilled:
            self.spilled_rows.load(row, cached, slots)
        elif not found.fills:
            self._begin_at(sequence, cached * self._size)
        if not found.coming and not found.fills:
            # A row that waits for another's may still need its own: the other one may end first.
            sequence.elsewhere = None
        # Those that report share few tokens of each step: a row that waited for one would be as slow.
        if self._computes_for_others(sequence) and not self._rows.report_end[row]:
            blocks = sequence.blocks
            self.prefix_waits.announce(row, blocks, self._hashes(sequence), len(found.owned), self._size)

    def kv_moved(self, message: KvMoved) -> list[tuple[Sequence, Load, int, float]]:
        """Let rows run whose blocks are loaded. Returns their sequences, with the blocks and seconds of each load.

        What could not be loaded is computed. ValueError for a report that fits no order.
        """
        return [
            (self._run_from(load.row, (load.first + count) * self._size), load, count, seconds)
            for load, count, seconds in self.spilled_rows.moved(message)
        ]

    def end_arrival(self, arrival: Arrival) -> Sequence | None:
        """Let a row run whose blocks have come, or some of them. Returns its sequence, if it still waits.

        If it also waits for blocks of another row, it runs when these are there, too.
        """
        waits = self.arrivals.has_owner(arrival)
        tokens = self.arrivals.end(arrival)
        if not waits:
            return None
        if not self.prefix_waits.has(arrival.row):
            return self._run_from(arrival.row, tokens)
        self._rows.awaited[arrival.row] = tokens
        return self._rows.sequence(arrival.row)

    def settle_waits(self) -> None:
        """Let rows run whose beginning the steps that were sent compute for others, or which has come for others."""
        for row in self.prefix_waits.settle():
            if self.arrivals.arrival_of(row) is None:
                self._run_from(row, int(self._rows.awaited[row]))

    def register(self, row: int, tokens: int) -> None:
        """Put the full blocks of the first `tokens` of a row into the prefix cache."""
        sequence = self._rows.sequence(row)
        if not self._prefix_cache or sequence.mixed or not self._images.shares_prefix(sequence):
            return
        full = self._shareable(sequence, tokens) // self._size
        hashes = self._hashes(sequence)
        pairs = zip(sequence.blocks[:full], hashes, strict=False)
        new = [index for index, (block, digest) in enumerate(pairs) if self._pool.register(block, digest)]
        if new and self.kv_log is not None and not self.runs_alone(sequence):
            # Those between may be registered under other blocks: readers take them once more.
            self.kv_log.stored(sequence, hashes, new[0], new[-1] + 1 - new[0])

    def _match(self, sequence: Sequence, hashes: list[bytes]) -> list[int]:
        """Cached blocks that hold the beginning of `sequence`, whose blocks have these hashes."""
        if not self._images.shares_prefix(sequence):
            return []
        found = self._pool.match(hashes)
        return found[: self._shareable(sequence, len(found) * self._size) // self._size] if found else found

    def _fills(self, sequence: Sequence, hashes: list[bytes]) -> list[Fill]:
        """The first blocks with these hashes that rows are filling for `sequence`; none if these are few."""
        found = self.prefix_waits.find(hashes)
        if not found or not self._computes_for_others(sequence):
            return []
        return found if len(found) * self._size >= self._min_awaited_tokens else []

    def _sent(self, fills: list[Fill]) -> list[Fill]:
        """The first of these blocks, as far as they are being sent for the rows that fill them."""
        return list(takewhile(lambda fill: self.arrivals.brings(fill.row, fill.version, fill.tokens), fills))

    def _coming(self, sequence: Sequence, first: int, before: list[Fill]) -> int:
        """How many blocks are worth sending from the worker that the sequence has left.

        They are those behind `first` ones and those `before`, for which it waits in any case. A sequence that runs
        alone is computed in whole pieces of its prompt, always the same ones.
        """
        if sequence.elsewhere is None or self.runs_alone(sequence):
            return 0
        awaited = {(fill.row, fill.version) for fill in before}
        return self.arrivals.find(sequence, first + len(before), awaited)

    def _spilled(self, sequence: Sequence, hashes: list[bytes]) -> list[bytes]:
        """The first of these digests whose blocks are worth loading for `sequence`."""
        if not self.spilled_rows.spill.slots or not self._computes_for_others(sequence):
            return []
        return self.spilled_rows.find(hashes)

    def _run_from(self, row: int, tokens: int) -> Sequence:
        """Let a row run whose first `tokens` tokens have come."""
        sequence = self._rows.sequence(row)
        self._rows.num_computed_tokens[row] = tokens
        self._rows.awaited[row] = 0
        self.register(row, tokens)
        self._begin_at(sequence, tokens)
        sequence.elsewhere = None
        return sequence

    def _computes_for_others(self, sequence: Sequence) -> bool:
        """Whether others may wait for the blocks of a sequence, and it for theirs."""
        return self._prefix_cache and not sequence.images and not self.runs_alone(sequence)

    def _begin_at(self, sequence: Sequence, cached: int) -> None:
        """Note that the first `cached` tokens of a sequence need no computing."""
        if sequence.emitted == 0 and sequence.preemptions == 0 and sequence.elsewhere is None:
            sequence.cached_tokens = sequence.context.cached_prefix_length = cached
        sequence.began_with = cached
        sequence.tokens.set_window(cached, len(sequence.tokens), len(sequence.tokens))
        self.placed_tokens += len(sequence.tokens)
        self.saved_tokens += cached

    def _hashes(self, sequence: Sequence) -> list[bytes]:
        return sequence.prefix_hashes(self._size, self.runs_alone(sequence))

    def _shareable(self, sequence: Sequence, tokens: int) -> int:
        """Number of the first `tokens` that others may use.

        For a sequence that runs alone these are whole pieces of the prompt: later tokens are computed one by one.
        """
        if not self.runs_alone(sequence):
            return tokens
        return min(tokens, sequence.prompt_len) // self.fixed_tokens * self.fixed_tokens
