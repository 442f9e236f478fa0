"""The adapters in one worker's memory: which are there, which leave for others, and which rows wait for theirs.

An adapter in use is a resource like a block. A sequence takes its adapter's memory when it is placed, and a sequence
for which there is none is not placed. A row whose adapter is still being read has its place already and runs later.
Adapters that no row uses stay until the room is wanted; then the least recently used leave first. Knows handles and
bytes. Does not know names, digests or files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from interfaces import AdapterState, DropAdapter, LoadAdapter
from scheduler.adapter import Adapter
from scheduler.rows import RowTable
from scheduler.sequence import Sequence

# Seconds without an answer of a worker that reads adapters, after which it seems to hang.
LOAD_SECONDS = 600.0


class WorkerAdapters:
    """The adapters of one worker, which may take `memory` bytes together; 0: it takes none."""

    def __init__(
        self,
        memory: int,
        table: RowTable,
        clock: Callable[[], float] = time.monotonic,
        in_batches: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        """`in_batches` gives the handles of the adapters that batches of texts use."""
        self.memory = memory
        # Handles of adapters that texts wait for: they do not leave.
        self.awaited: set[int] = set()
        # Adapters that left for others.
        self.evictions = 0
        self._table = table
        self._in_batches = in_batches
        self._clock = clock
        # In memory or being read, the least recently used first.
        self._held: dict[int, Adapter] = {}
        self._loading: dict[int, Adapter] = {}
        # Reasons why adapters cannot be used on this worker.
        self._failed: dict[int, str] = {}
        self._unsent: list[tuple[Adapter, bool]] = []
        self._last_answer = clock()

    @property
    def takes_any(self) -> bool:
        return self.memory > 0

    @property
    def used(self) -> int:
        """Bytes of the adapters that are held."""
        return sum(adapter.size for adapter in self._held.values())

    @property
    def loading(self) -> list[Adapter]:
        """The adapters that the worker reads now. If it dies, one of them may be the reason."""
        return list(self._loading.values())

    def holds(self, adapter: Adapter) -> bool:
        return adapter.handle in self._held

    def has_read(self, adapter: Adapter) -> bool:
        """Whether a batch may use the adapter."""
        return adapter.handle in self._held and adapter.handle not in self._loading

    def used_now(self, adapter: Adapter) -> None:
        """Note that an adapter that is held is used: others leave before it."""
        self._held[adapter.handle] = self._held.pop(adapter.handle)

    def problem(self, adapter: Adapter) -> str:
        """Why this worker can never run a sequence with the adapter; empty if it can."""
        if not self.takes_any:
            return "its model worker takes no adapters"
        return self._failed.get(adapter.handle, "") or self._too_large(adapter)

    def has_room(self, adapter: Adapter) -> bool:
        """Whether the adapter is here, or would be if adapters left that no row uses and that are not pinned."""
        return adapter.handle in self._held or self._kept() + adapter.size <= self.memory

    def load(self, adapter: Adapter) -> None:
        """Begin to load an adapter. Others leave for it, as far as they may."""
        if adapter.handle in self._held:
            return
        self.make_room(adapter.size)
        if not self._loading:
            self._last_answer = self._clock()
        self._held[adapter.handle] = adapter
        self._loading[adapter.handle] = adapter
        self._unsent.append((adapter, True))

    def make_room(self, size: int = 0) -> None:
        """Let adapters leave until `size` more bytes fit, as far as they may."""
        if self.used + size <= self.memory:
            return  # without a look at all rows: it is asked for each step
        users = self._users()
        for handle, held in list(self._held.items()):
            if self.used + size <= self.memory:
                return
            if self._may_leave(held, users):
                self.evictions += 1
                self._remove(handle)

    def placed(self, sequence: Sequence) -> None:
        """Give a sequence with a row its adapter. The row waits until that is read."""
        adapter = sequence.adapter
        if adapter is None:
            return
        self.load(adapter)
        self.used_now(adapter)
        self._table.awaits_adapter[sequence.row] = adapter.handle in self._loading

    def loaded(self, handle: int) -> list[Sequence]:
        """Let the rows run that wait for this adapter. Returns their sequences."""
        self._last_answer = self._clock()
        if self._loading.pop(handle, None) is None:
            return []
        waiting = self._rows_of(handle)
        for sequence in waiting:
            self._table.awaits_adapter[sequence.row] = False
        return waiting

    def failed(self, adapter: Adapter, reason: str) -> list[Sequence]:
        """Note that the worker could not read an adapter. Returns the sequences that wait for it: they must leave."""
        self._last_answer = self._clock()
        self._loading.pop(adapter.handle, None)
        if self._held.pop(adapter.handle, None) is None:
            return []
        self.refuse(adapter, reason)
        return self._rows_of(adapter.handle)

    def refuse(self, adapter: Adapter, reason: str) -> None:
        """Take no sequence with this adapter."""
        self._failed[adapter.handle] = reason

    def forgive(self, adapter: Adapter) -> None:
        """Take sequences with an adapter again whose files are in order now."""
        self._failed.pop(adapter.handle, None)

    def drop(self, adapter: Adapter) -> None:
        """Free an adapter that no row uses."""
        self.forgive(adapter)
        if adapter.handle in self._held:
            self._remove(adapter.handle)

    def take_messages(self, incarnation: int, epoch: int) -> list[LoadAdapter | DropAdapter]:
        """What the worker must be sent before its next step.

        There may be too many adapters: one that was loaded while rows used all others, and is pinned, or whose size has
        turned out to be larger. Others leave as soon as they may.
        """
        self.make_room()
        if not self._unsent:
            return []
        unsent = self._unsent
        self._unsent = []
        return [
            LoadAdapter(incarnation, epoch, adapter.handle, adapter.path, adapter.digest)
            if loads
            else DropAdapter(incarnation, epoch, adapter.handle)
            for adapter, loads in unsent
        ]

    def lateness(self) -> float | None:
        """Seconds that an adapter has taken that takes too long; None while none does."""
        if not self._loading:
            return None
        taken = self._clock() - self._last_answer
        return taken if taken > LOAD_SECONDS else None

    def grant_grace(self) -> None:
        """Count the time of loading from now."""
        self._last_answer = self._clock()

    def _too_large(self, adapter: Adapter) -> str:
        """Why the adapter can never have room, although it had some elsewhere or before; empty if it can."""
        held = self._held.values()
        pinned = sum(one.size for one in held if one.pinned and one.state == AdapterState.READY)
        if adapter.handle in self._held or pinned + adapter.size <= self.memory:
            return ""
        return (
            f"the {adapter} takes {adapter.size} bytes, and adapters may take {self.memory} on its model worker "
            f"(lora_memory), of which pinned ones take {pinned}: raise lora_memory, or unload a pinned one"
        )

    def _kept(self) -> int:
        """Bytes of the adapters that cannot leave."""
        users = self._users()
        return sum(adapter.size for adapter in self._held.values() if not self._may_leave(adapter, users))

    def _may_leave(self, adapter: Adapter, users: set[int]) -> bool:
        return not adapter.pinned and adapter.handle not in users and adapter.handle not in self._loading

    def _users(self) -> set[int]:
        """Handles of the adapters that rows and batches use, or will use next."""
        rows = (sequence for sequence in self._table.sequences if sequence is not None)
        of_rows = {sequence.adapter.handle for sequence in rows if sequence.adapter is not None}
        return of_rows.union(self._in_batches(), self.awaited)

    def _rows_of(self, handle: int) -> list[Sequence]:
        rows = (sequence for sequence in self._table.sequences if sequence is not None)
        return [one for one in rows if one.adapter is not None and one.adapter.handle == handle]

    def _remove(self, handle: int) -> None:
        adapter = self._held.pop(handle)
        self._loading.pop(handle, None)
        if (adapter, True) in self._unsent:
            self._unsent.remove((adapter, True))
        else:
            self._unsent.append((adapter, False))
