"""Saves blocks and loads them, in a thread of its own, while steps go on.

Orders are carried out one after the other, in the order of the steps that brought them, so a slot that is saved and
then loaded holds what was saved. What a save keeps is copied before its step begins; of that only so much may wait for
the disk, and the rest is skipped. A block whose bytes do not have the sum that they had when they were written is not
loaded. Knows blocks, slots and tickets. Does not know sequences.
"""

from __future__ import annotations

import errno
import logging
import queue
import time
import zlib
from dataclasses import dataclass, field
from threading import Lock, Thread

import numpy as np
from numpy.typing import NDArray

from interfaces import KvMoved, Step
from model_worker.device_copy import Mark
from model_worker.kv_spill.blocks import Blocks, Copied
from model_worker.kv_spill.places import Place
from model_worker.rows import StepError
from model_worker.wake_up import WakeUp

log = logging.getLogger(__name__)

# Bytes that may wait to be written.
WAITING_BYTES = 256 << 20
# Blocks that are read before they are copied into the cache together.
_TOGETHER = 16
SECONDS_BETWEEN_COMPLAINTS = 60.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(slots=True)
class _Save:
    slots: list[int]
    copied: Copied


@dataclass(slots=True)
class _Skip:
    slots: list[int]


@dataclass(slots=True)
class _Load:
    ticket: int
    slots: list[int]
    blocks: list[int]
    after: Mark


@dataclass(slots=True)
class _Moved:
    """What is to be reported."""

    loads: list[tuple[int, int, float]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    full: bool = False

    def __bool__(self) -> bool:
        return bool(self.loads or self.skipped or self.broken)


class KvMover:
    """Moves blocks between a cache and `slots` slots of a place. All but `_run` is for the thread that runs steps."""

    def __init__(self, blocks: Blocks, place: Place, slots: int, num_blocks: int, epoch: int, index: int) -> None:
        """`epoch` and `index` are the worker's."""
        self.slots = slots
        self.place = place
        self._blocks = blocks
        self._num_blocks = num_blocks
        self._whose = epoch, index
        self._incarnation = -1
        self._orders: queue.Queue[_Save | _Skip | _Load] = queue.Queue()
        self._lock = Lock()
        self._moved = _Moved()
        self._waiting_bytes = 0
        # The sums of what the slots hold; -1: nothing. They are the thread's own.
        self._sums = np.full(slots, -1, np.int64)
        self._complained = -SECONDS_BETWEEN_COMPLAINTS
        self._thread: Thread | None = None
        self._wake_up = WakeUp()

    @property
    def still(self) -> bool:
        """Whether orders are taken only while no step is in flight."""
        return self._blocks.still

    def fileno(self) -> int:
        """Becomes readable when `take` has something."""
        return self._wake_up.fileno()

    def order(self, step: Step) -> None:
        """Begin what a step asks for, before the step itself. StepError for blocks and slots that there are not."""
        self._incarnation = step.incarnation
        none = np.empty((0, 3), np.int32)
        save = none if step.save is None else step.save
        load = none if step.load is None else step.load
        self._check(step, np.concatenate([save[:, 0], load[:, 2]]), np.concatenate([save[:, 1], load[:, 1]]))
        if self._thread is None:
            self._thread = Thread(target=self._run, name="kv spill", daemon=True)
            self._thread.start()
        self._save(save[:, 0], save[:, 1].tolist())
        for ticket in dict.fromkeys(load[:, 0].tolist()):
            mine = load[load[:, 0] == ticket]
            self._orders.put(_Load(ticket, mine[:, 1].tolist(), mine[:, 2].tolist(), self._blocks.mark()))

    def take(self) -> list[KvMoved]:
        """The report of what was done since the last call."""
        self._wake_up.clear()
        with self._lock:
            moved, self._moved = self._moved, _Moved()
        if not moved:
            return []
        tickets, blocks, seconds = zip(*moved.loads, strict=True) if moved.loads else ((), (), ())
        return [
            KvMoved(
                self._incarnation,
                *self._whose,
                tickets=np.array(tickets, np.int32),
                blocks=np.array(blocks, np.int32),
                seconds=np.array(seconds, np.float32),
                skipped=np.array(moved.skipped, np.int32),
                broken=np.array(moved.broken, np.int32),
                full=moved.full,
            )
        ]

    def finish(self) -> None:
        """Wait until all orders are carried out."""
        self._orders.join()

    def forget(self) -> None:
        """Carry out what was ordered, and forget what the slots hold: the next orders are another registration's."""
        self.finish()
        self._sums[:] = -1
        self.take()

    def _check(self, step: Step, blocks: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        for what, numbers, most in (("block", blocks, self._num_blocks), ("slot", slots, self.slots)):
            if len(numbers) and (numbers.min() < 0 or numbers.max() >= most):
                raise StepError(f"step {step.step} saves or loads a {what} outside 0..{most - 1}")

    def _save(self, blocks: NDArray[np.int32], slots: list[int]) -> None:
        size = self._blocks.block_bytes
        with self._lock:
            room = max(0, (WAITING_BYTES - self._waiting_bytes) // size)
            self._waiting_bytes += min(room, len(slots)) * size
        if slots[:room]:
            self._orders.put(_Save(slots[:room], self._blocks.copy_out(blocks[:room])))
        if slots[room:]:
            # In its turn: a save before it may still be about to fill the same slot.
            self._orders.put(_Skip(slots[room:]))

    # The thread

    def _run(self) -> None:
        while True:
            order = self._orders.get()
            moved = _Moved()
            try:
                self._carry_out(order, moved)
            except Exception:  # steps go on, and what was to be loaded is computed
                log.exception("blocks beside the KV cache could not be moved by an error of ours")
                if isinstance(order, _Load):
                    moved.loads.append((order.ticket, 0, 0.0))
            finally:
                self._report(moved)
                self._orders.task_done()

    def _carry_out(self, order: _Save | _Skip | _Load, moved: _Moved) -> None:
        match order:
            case _Save():
                try:
                    self._write(order, moved)
                finally:
                    with self._lock:
                        self._waiting_bytes -= len(order.slots) * self._blocks.block_bytes
            case _Skip():
                self._sums[order.slots] = -1
                moved.skipped += order.slots
            case _Load():
                began = time.perf_counter()
                count = self._read(order, moved)
                moved.loads.append((order.ticket, count, time.perf_counter() - began))

    def _write(self, order: _Save, moved: _Moved) -> None:
        # Whatever goes wrong, none of these slots holds what it held before.
        self._sums[order.slots] = -1
        for slot, data in zip(order.slots, order.copied.wait(), strict=True):
            try:
                self.place.write(slot, data)
                self._sums[slot] = zlib.crc32(data.data)
            except OSError as error:
                moved.broken.append(slot)
                full = error.errno in _FULL
                moved.full |= full
                advice = ": it grows no more; make room, or lower kv_spill" if full else ""
                self._complain(f"{self.place.name} takes no block of the KV cache ({error.strerror}){advice}")

    def _read(self, order: _Load, moved: _Moved) -> int:
        """Load the blocks of a ticket, and return how many of them, from the first on, are there."""
        count = 0
        while count < len(order.slots):
            slots = order.slots[count : count + _TOGETHER]
            data = np.empty((len(slots), self._blocks.block_bytes), np.uint8)
            whole = next((i for i, slot in enumerate(slots) if not self._fetch(slot, data[i], moved)), len(slots))
            if whole:
                blocks = np.array(order.blocks[count : count + whole], np.int32)
                self._blocks.copy_in(blocks, data[:whole], order.after)
            count += whole
            if whole < len(slots):
                break
        return count

    def _fetch(self, slot: int, into: NDArray[np.uint8], moved: _Moved) -> bool:
        """Read a slot. False if it holds nothing, or not what was written."""
        if self._sums[slot] < 0:
            return False
        try:
            self.place.read(slot, into)
            problem = "" if zlib.crc32(into.data) == self._sums[slot] else "its bytes are not those that were written"
        except OSError as error:
            problem = str(error.strerror)
        if problem:
            self._sums[slot] = -1
            moved.broken.append(slot)
            self._complain(f"a block of the KV cache cannot be read from {self.place.name}, and is computed: {problem}")
        return not problem

    def _report(self, moved: _Moved) -> None:
        if not moved:
            return
        with self._lock:
            self._moved.loads += moved.loads
            self._moved.skipped += moved.skipped
            self._moved.broken += moved.broken
            self._moved.full |= moved.full
        self._wake_up.wake()

    def _complain(self, text: str) -> None:
        now = time.monotonic()
        if now - self._complained >= SECONDS_BETWEEN_COMPLAINTS:
            self._complained = now
            log.warning("%s", text)
