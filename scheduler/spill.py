"""Blocks of one worker that lie beside its KV cache, on a disk or in a GPU's host memory: what is where, what moves.

A block that leaves the prefix cache is saved in a slot, under its hash. A sequence whose beginning lies in slots has it
loaded, where that takes less time than to compute it; both are measured (`copy_time.py`). Slots are reused least
recently used first.

The worker carries orders out in the order in which it gets them, so a slot counts as written from the moment at which
its order is made. What could not be written or read is not loaded, and is computed instead. Nothing here outlives the
worker's epoch. Knows hashes, slots and blocks. Does not know requests or tensors.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from interfaces import KvMoved
from scheduler.copy_time import CopyTime

# Fewer blocks are computed: a load takes a step's time in any case.
LEAST_BLOCKS = 2
# A load that takes longer than this is not waited for.
LOAD_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks that get what slots have: those of a row from index `first` on. `version` is the row's.

    `seconds` is the time that it is expected to take, and `computing` the time that computing would take.
    """

    row: int
    version: int
    first: int
    blocks: list[int]
    ordered: float
    seconds: float | None
    computing: float | None


class Spill:
    """`slots` places for blocks; none if 0."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        # Falls when the place turns out to be full.
        self.slots = slots
        # Blocks that were saved, and blocks that were loaded, until now.
        self.saved = 0
        self.loaded = 0
        self._clock = clock
        # Least recently used first.
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._digest_of: dict[int, bytes] = {}
        # Slots from here on were never written; of those before it these hold nothing.
        self._written = 0
        self._free: set[int] = set()
        self._loads: dict[int, Load] = {}
        # Slots that are read by orders which were not sent: those orders come after all saves of their step.
        self._held: set[int] = set()
        self._last_ticket = 0
        self._saves: list[tuple[int, int, int]] = []
        self._load_orders: list[tuple[int, int, int]] = []
        self._copy_time = CopyTime(clock)

    @property
    def used(self) -> int:
        """Slots that hold a block."""
        return len(self._slot_of)

    @property
    def has_orders(self) -> bool:
        """Whether the worker has something to save or to load."""
        return bool(self._saves or self._load_orders)

    @property
    def late(self) -> bool:
        """Whether a load takes so long that no other is begun."""
        oldest = next(iter(self._loads.values()), None)
        return oldest is not None and self._clock() - oldest.ordered > LOAD_SECONDS

    def expected_seconds(self, blocks: int) -> float | None:
        """The time until so many more blocks are loaded, behind those under way; None while nothing is measured."""
        one = self._copy_time.block_seconds
        return None if one is None else one * (blocks + self._loading)

    def match(self, hashes: Iterable[bytes], computing: float | None) -> list[bytes]:
        """The longest beginning of `hashes` that is worth loading; `computing` one block takes so many seconds."""
        found: list[bytes] = []
        if not self._slot_of or self.late:
            return found
        for digest in hashes:
            if digest not in self._slot_of:
                break
            found.append(digest)
        pays = len(found) >= LEAST_BLOCKS and self._copy_time.pays(len(found), self._loading, computing)
        return found if pays else []

    def save(self, block: int, digest: bytes, computing: float | None) -> None:
        """Keep what a block holds before it is given away with the next step."""
        if digest in self._slot_of:
            self._slot_of.move_to_end(digest)
            return
        # It is read some other day, and not behind the loads of now.
        slot = self._take_slot() if self._copy_time.pays(1, 0, computing) else None
        if slot is None:
            return
        self._slot_of[digest] = slot
        self._digest_of[slot] = digest
        self._saves.append((block, slot, 0))
        self.saved += 1

    def hold(self, digests: Sequence[bytes]) -> list[int]:
        """Keep the slots of these digests from being written in the next step. Returns the slots."""
        # The beginning of a prefix, by which it is found, goes last.
        for digest in reversed(digests):
            self._slot_of.move_to_end(digest)
        slots = [self._slot_of[digest] for digest in digests]
        self._held.update(slots)
        return slots

    def load(
        self, row: int, version: int, first: int, blocks: list[int], slots: list[int], computing: float | None
    ) -> Load:
        """Fill `blocks` from slots that are held."""
        self._last_ticket += 1
        expected = self.expected_seconds(len(blocks))
        whole = None if computing is None else computing * len(blocks)
        load = Load(row, version, first, blocks, self._clock(), expected, whole)
        self._loads[self._last_ticket] = load
        self._load_orders += [(self._last_ticket, slot, block) for slot, block in zip(slots, blocks, strict=True)]
        return load

    @property
    def any_loads(self) -> bool:
        """Whether a load is under way."""
        return bool(self._loads)

    def loads(self) -> list[Load]:
        """The loads under way, oldest first."""
        return list(self._loads.values())

    def take_orders(self) -> tuple[NDArray[np.int32] | None, NDArray[np.int32] | None]:
        """`Step.save` and `Step.load` of the step that is sent now."""
        orders = self._saves, self._load_orders
        self._saves, self._load_orders = [], []
        self._held.clear()
        save, load = (np.array(order, np.int32) if order else None for order in orders)
        return save, load

    def answered(self, message: KvMoved) -> list[tuple[Load, int, float]]:
        """Learn from a report. Returns the loads that have ended, with the blocks that are there, and the seconds.

        ValueError for a report that fits no order.
        """
        if not len(message.tickets) == len(message.blocks) == len(message.seconds):
            raise ValueError("the columns of a report about moved blocks do not fit together")
        if message.full:
            self.slots = self._written
        for slot in (*message.skipped.tolist(), *message.broken.tolist()):
            self._forget(slot)
        self._free.update(slot for slot in message.skipped.tolist() if 0 <= slot < self._written)
        ended = []
        columns = message.tickets.tolist(), message.blocks.tolist(), message.seconds.tolist()
        for ticket, blocks, seconds in zip(*columns, strict=True):
            load = self._loads.get(ticket)
            if load is None or not 0 <= blocks <= len(load.blocks):
                raise ValueError(f"no load has ticket {ticket} and {blocks} blocks")
            del self._loads[ticket]
            self.loaded += blocks
            self._copy_time.learn(blocks, seconds)
            ended.append((load, blocks, seconds))
        return ended

    def clear(self) -> None:
        """Forget all that is kept. Loads under way go on."""
        self._free.update(self._digest_of.keys() - self._held)
        self._slot_of.clear()
        self._digest_of.clear()
        self._saves.clear()

    @property
    def _loading(self) -> int:
        """Blocks of the loads under way."""
        return sum(len(load.blocks) for load in self._loads.values())

    def _take_slot(self) -> int | None:
        """A slot to write; None if all are about to be read."""
        if self._free:
            return self._free.pop()
        if self._written < self.slots:
            self._written += 1
            return self._written - 1
        digest = next((digest for digest, slot in self._slot_of.items() if slot not in self._held), None)
        if digest is None:
            return None
        slot = self._slot_of.pop(digest)
        del self._digest_of[slot]
        return slot

    def _forget(self, slot: int) -> None:
        digest = self._digest_of.pop(slot, None)
        if digest is not None:
            del self._slot_of[digest]
