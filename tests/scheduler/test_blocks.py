"""Block pool: no block owned twice, none lost, whatever the order of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.blocks import BlockPool

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """A naive model: lists of owned blocks, and a dict of what each registered block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[list[int]] = []
        self.digests: dict[int, bytes] = {}
        self.next_digest = 0

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        owned = {block for holder in self.holders for block in holder}
        if count > NUM_BLOCKS - len(owned):
            with pytest.raises(ValueError, match="available"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not owned & set(blocks)
        for block in blocks:
            self.digests.pop(block, None)
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        for block in data.draw(st.sampled_from(self.holders)):
            self.next_digest += 1
            digest = self.next_digest.to_bytes(4, "big")
            self.pool.register(block, digest)
            self.digests.setdefault(block, digest)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.pool.release(holder)

    @precondition(lambda self: self.digests)
    @rule(data=st.data())
    def match_and_share(self, data: st.DataObject) -> None:
        block, digest = data.draw(st.sampled_from(sorted(self.digests.items())))
        assert self.pool.match([digest, b"unknown", digest]) == [block]
        self.pool.share([block])
        self.holders.append([block])

    @rule()
    def forget(self) -> None:
        self.pool.forget_cached()
        owned = {block for holder in self.holders for block in holder}
        self.digests = {block: digest for block, digest in self.digests.items() if block in owned}

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def forget_what_one_holds(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.pool.forget(holder)
        for block in holder:
            if sum(block in other for other in self.holders) == 1:
                digest = self.digests.pop(block, None)
                assert digest is None or self.pool.match([digest]) == []

    @invariant()
    def nothing_is_lost_or_owned_in_secret(self) -> None:
        owned = {block for holder in self.holders for block in holder}
        assert self.pool.used == len(owned)
        assert self.pool.available == NUM_BLOCKS - len(owned)
        assert self.pool.cached == len(set(self.digests) - owned)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_the_least_recently_released_prefix_is_evicted_first_and_from_its_end() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    for block, digest in zip(first + second, (b"a0", b"a1", b"b0", b"b1"), strict=True):
        pool.register(block, digest)
    pool.release(first)
    pool.release(second)
    pool.allocate(1)
    assert pool.match([b"a0", b"a1"]) == first[:1]
    assert pool.match([b"b0", b"b1"]) == second


def test_releasing_a_free_block_is_an_error() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="no owner"):
        pool.release([0])
