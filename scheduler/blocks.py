"""The KV blocks of one worker: who owns them, which are free, and which still hold a prefix worth keeping.

A block is free, owned or cached. Several sequences with the same prefix may own it together. A cached block has no
owner, but its content is registered under a hash and can be taken again until it is evicted, least recently used first.
Knows block numbers and hashes, never tokens or tensors.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """`num_blocks` blocks, numbered from 0."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._owners = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        # Takes each digest that can be found no more.
        self.on_evict: Callable[[bytes], None] | None = None
        # Takes each block that is given away although it is cached, and its digest.
        self.on_reuse: Callable[[int, bytes], None] | None = None

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks without an owner that still hold a registered prefix."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - self.available

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks that hold the longest registered prefix of `hashes`. They get no owner by this."""
        found: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def unowned(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are cached. Sharing these lowers `available`."""
        return sum(self._owners[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to blocks that `match` returned."""
        for block in blocks:
            self._owners[block] += 1
            self._cached.pop(block, None)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, with one owner each and no content. ValueError when fewer are available."""
        if count > self.available:
            raise ValueError(f"{count} blocks asked for, {self.available} available")
        blocks = [self._free.popleft() if self._free else self._reuse() for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Remove an owner. The end of a prefix is evicted before its beginning, by which it is found."""
        for block in reversed(blocks):
            if self._owners[block] <= 0:
                raise ValueError(f"block {block} has no owner")
            self._owners[block] -= 1
            if self._owners[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def register(self, block: int, digest: bytes) -> bool:
        """Name the content of `block`, which others can match from now on. Returns whether the digest is new.

        The first block registered under a digest stays the one that matches.
        """
        if digest in self._block_of or block in self._hash_of:
            return False
        self._block_of[digest] = block
        self._hash_of[block] = digest
        return True

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop the names of those of `blocks` that have one owner: what they hold may be wrong."""
        for block in blocks:
            if self._owners[block] == 1 and block in self._hash_of:
                self._unname(block)

    def forget_cached(self) -> None:
        """Drop every cached prefix that has no owner."""
        while self._cached:
            self._free.append(self._evict())

    def _reuse(self) -> int:
        if self.on_reuse is not None:
            block = next(iter(self._cached))
            self.on_reuse(block, self._hash_of[block])
        return self._evict()

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._unname(block)
        return block

    def _unname(self, block: int) -> None:
        digest = self._hash_of.pop(block)
        del self._block_of[digest]
        if self.on_evict is not None:
            self.on_evict(digest)
