"""The seconds of work that wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.scheduler.test_core import LIMITS, Yard


def test_nothing_is_known_before_anything_was_computed() -> None:
    yard = Yard()
    yard.submit(0, list(range(30)), 5, [])
    assert yard.scheduler.status().backlog_seconds == 0


def test_prompts_count_by_the_measured_speed_of_all_workers() -> None:
    yard = Yard(replace(LIMITS, prefix_cache=False), workers=2, num_blocks=400)
    for worker in yard.scheduler.workers.values():
        worker.prefill_budget.learn(0, 10, 1.0)
    assert yard.scheduler.status().backlog_seconds == 0
    for handle in range(4):
        yard.submit(handle, list(range(50)), 5, [])
    assert yard.scheduler.status().backlog_seconds == pytest.approx(200 * 0.1 / 2), "200 tokens wait"
    yard.scheduler.next_steps()
    assert len(yard.scheduler.waiting) == 0
    assert yard.scheduler.status().backlog_seconds == pytest.approx((200 - 2 * 16) * 0.1 / 2), "two steps were sent"


def test_requests_without_a_row_count_by_the_rate_of_ends() -> None:
    yard = Yard(replace(LIMITS, max_running=2), num_blocks=400)
    for handle in range(4):
        yard.submit(handle, [handle], 5, [])
    yard.scheduler.status()
    for _ in range(200):
        yard.clock.advance(0.01)
        yard.turn()
        yard.scheduler.status()
        if len(yard.finished) == 2:
            break
    assert len(yard.finished) == 2
    yard.scheduler.next_steps()
    for handle in range(10, 16):
        yard.submit(handle, [handle], 5, [])
    found = yard.scheduler.status().backlog_seconds
    rate = yard.scheduler.backlog._ends_per_second
    assert rate > 0
    assert found == pytest.approx(6 / rate, rel=0.2)
