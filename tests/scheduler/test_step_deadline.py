"""The deadline of a step: learnt, generous to long prefills, and still a deadline."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.step_deadline import FIRST_STEP_SECONDS, StepDeadline

steps = st.lists(st.tuples(st.integers(1, 4096), st.floats(0.0001, 5)), min_size=1, max_size=200)


def test_the_first_steps_may_compile() -> None:
    assert StepDeadline(15).allowed(1) == FIRST_STEP_SECONDS


@given(steps, st.floats(1, 60), st.integers(1, 4096))
def test_a_step_like_those_before_is_never_late(before: list[tuple[int, float]], least: float, tokens: int) -> None:
    clock = StepDeadline(least)
    for count, seconds in before:
        clock.learn(count, seconds)
    recent = before[-64:]
    assert clock.allowed(tokens) > least
    assert clock.allowed(tokens) > 9 * max(seconds for _, seconds in recent)
    assert clock.allowed(tokens) <= least + 10 * 5 * 4096


def test_a_long_prefill_after_much_decoding_is_not_late() -> None:
    clock = StepDeadline(15)
    for _ in range(500):
        clock.learn(4, 0.03)
    assert clock.allowed(512) > 15 + 0.03 * 512 / 4
    assert clock.allowed(4) < 16


def test_what_was_slow_once_is_forgotten() -> None:
    clock = StepDeadline(1)
    clock.learn(1, 100.0)
    for _ in range(64):
        clock.learn(1, 0.01)
    assert clock.allowed(1) < 2
