"""A decode batch that repeats: every token has a block, and repetitions end before a row does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.batch import build_step
from tests.scheduler.test_in_flight import Bench


@given(st.lists(st.integers(3, 40), min_size=1, max_size=4), st.integers(0, 12), st.integers(40, 60))
def test_repetitions_have_blocks_and_stay_below_the_limit_of_each_row(
    limits: list[int], repeats: int, blocks: int
) -> None:
    bench = Bench(blocks=blocks)
    for limit in limits:
        bench.join(limit)
    table = bench.table
    while True:
        step = build_step(bench.worker, 1, 10_000, repeats, lambda _: pytest.fail("blocks are plenty"))
        if step is None:
            break
        assert step.repeats <= repeats
        for row in step.rows.tolist():
            assert table.num_computed_tokens[row] <= table.num_blocks[row] * bench.worker.block_size
            if step.repeats:
                assert table.num_tokens[row] < table.limit[row], "the step that ends the repetitions needs work"
        for i in range(step.repeats + 1):
            repetition = step.after(i)
            assert repetition is not None
            bench.result(repetition)
        for row in table.occupied().tolist():
            if len(bench.owner(row).tokens) >= table.limit[row]:
                bench.worker.remove(row)
    assert bench.table.running == 0
    assert bench.worker.pool.used == 0


def test_without_blocks_for_repetitions_there_are_none() -> None:
    bench = Bench(rows=1, blocks=1)
    bench.join()
    bench.result(bench.send())
    assert bench.send(repeats=3).repeats == 0, "the block has room for one token and two repetitions"


def test_a_row_that_changes_ends_the_batch() -> None:
    bench = Bench()
    bench.join()
    bench.result(bench.send())
    assert bench.send(repeats=2).repeats == 2
    bench.join()
    changed = bench.send(repeats=2)
    assert changed.repeats == 0
    assert changed.joins
