"""Copying or computing: by what was measured, and how long ago, and not by how often somebody asks."""

from __future__ import annotations

import pytest

from scheduler.copy_time import FAILED_TIMES, HALF_LIFE, MOST_BLOCKS, CopyTime
from tests.scheduler.clock import Clock


def measured(blocks: int, seconds: float) -> tuple[CopyTime, Clock]:
    clock = Clock()
    time = CopyTime(clock)
    time.learn(blocks, seconds)
    return time, clock


def test_what_is_not_known_is_tried() -> None:
    time = CopyTime(Clock())
    assert time.block_seconds is None
    assert time.pays(4, 100, 0.001)
    time.learn(0, 5.0)
    assert time.block_seconds is None, "a copy of no block says nothing"
    time.learn(2, 1.0)
    assert time.pays(4, 0, None), "the time of computing is not known"


def test_those_ahead_are_waited_for() -> None:
    time, _ = measured(10, 0.1)
    assert time.block_seconds == pytest.approx(0.01)
    assert time.pays(4, 0, computing=0.011)
    assert not time.pays(4, 0, computing=0.009)
    assert time.pays(4, 4, computing=0.021)
    assert not time.pays(4, 4, computing=0.019)


@pytest.mark.parametrize(("times", "half_lives"), [(1.9, 1), (3.9, 2), (1000, 10), (2.0**99.5, 100)])
def test_a_time_is_doubted_by_its_age_alone(times: float, half_lives: int) -> None:
    time, clock = measured(10, 10 * times)
    clock.advance((half_lives - 1) * HALF_LIFE)
    for _ in range(10_000):
        assert not time.pays(4, 0, computing=1.0)
    assert time.block_seconds == pytest.approx(times), "the doubt is no measurement"
    clock.advance(HALF_LIFE)
    assert time.pays(4, 0, computing=1.0)
    assert not time.pays(4, 4, computing=1.0), "a few are tried, and not all that wait"


def test_a_new_time_after_long_counts_more_than_the_old_one() -> None:
    soon, _ = measured(MOST_BLOCKS, 16.0)
    soon.learn(MOST_BLOCKS, 0.0)
    assert soon.block_seconds == pytest.approx(0.5)
    late, clock = measured(MOST_BLOCKS, 16.0)
    clock.advance(10 * HALF_LIFE)
    late.learn(MOST_BLOCKS, 0.0)
    assert late.block_seconds == pytest.approx(0, abs=0.001)


def test_many_earlier_blocks_count_as_a_few() -> None:
    time, _ = measured(100_000, 100.0)
    time.learn(MOST_BLOCKS, MOST_BLOCKS * 1.0)
    assert time.block_seconds == pytest.approx(0.5005)


def test_a_slow_copy_of_many_blocks_counts_as_a_few() -> None:
    time, _ = measured(100, 0.1)
    time.learn(200, 200 * 1.0)
    assert time.block_seconds == pytest.approx(0.5005)


def test_a_copy_that_fails_counts_as_a_slow_one() -> None:
    clock = Clock()
    time = CopyTime(clock)
    time.failed(3, None)
    assert time.block_seconds is None, "it is not known how slow it is"
    time.failed(3, 0.5)
    assert time.block_seconds == pytest.approx(FAILED_TIMES * 0.5)
    assert not time.pays(4, 0, computing=0.5)
    clock.advance(3 * HALF_LIFE)
    assert time.pays(4, 0, computing=0.5), "it is tried again"
    time.failed(3, 0.5)
    assert not time.pays(4, 0, computing=0.5)
    clock.advance(3 * HALF_LIFE)
    assert not time.pays(4, 0, computing=0.5), "it is tried later and later"
    clock.advance(10 * HALF_LIFE)
    time.learn(3, 0.003)
    assert time.pays(4, 0, computing=0.5)
