"""What changed in the prefix cache of one worker since the last look, for those who keep an index of it elsewhere.

Blocks of sequences with a client's salt, with images, or that run alone are left out: their hashes mean nothing to
others, and their tokens are for no one else.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from scheduler.blocks import BlockPool
from scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks that hold a prefix now. `parent` is the hash before the first; None at the beginning."""

    hashes: list[bytes]
    parent: bytes | None
    tokens: list[int]
    adapter: int | None


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that hold no prefix any more."""

    hashes: list[bytes]


class KvLog:
    """The changes of a pool, oldest first."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.block_size = block_size
        self._known: set[bytes] = set()
        self._changes: list[Stored | Removed] = []
        pool.on_evict = self._evicted

    def stored(self, sequence: Sequence, hashes: Items[bytes], first: int, count: int) -> None:
        """Note `count` blocks of a sequence, from index `first` on, that can be found now."""
        if sequence.context.cache_salt or sequence.images:
            return
        size = self.block_size
        tokens = sequence.tokens.all[first * size : (first + count) * size].tolist()
        parent = hashes[first - 1] if first else None
        adapter = sequence.adapter.handle if sequence.adapter is not None else None
        new = list(hashes[first : first + count])
        self._known.update(new)
        self._changes.append(Stored(new, parent, tokens, adapter))

    def take(self) -> list[Stored | Removed]:
        """The changes since the last call."""
        changes = self._changes
        self._changes = []
        return changes

    def _evicted(self, digest: bytes) -> None:
        if digest not in self._known:
            return
        self._known.discard(digest)
        if self._changes and isinstance(self._changes[-1], Removed):
            self._changes[-1].hashes.append(digest)
        else:
            self._changes.append(Removed([digest]))
