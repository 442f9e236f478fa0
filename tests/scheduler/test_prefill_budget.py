"""Prompts beside rows in decode: nobody's rhythm is broken, and every prompt comes to its end."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from scheduler.prefill_budget import MIN_PREFILL_TOKENS, PREFILL_SHARE, STEPS_BETWEEN_MEASUREMENTS, PrefillBudget
from tests.scheduler.test_core import LIMITS, Yard

machines = st.tuples(st.floats(1e-3, 0.05), st.floats(1e-5, 5e-3), st.floats(1e-5, 5e-3), st.integers(0, 2**32))


class Machine:
    """Steps take so many seconds, and so many more for each row in decode and each token of a prompt."""

    def __init__(self, step: float, row: float, token: float, seed: int) -> None:
        self._costs, self._random = (step, row, token), random.Random(seed)

    def seconds(self, decoding: int, prompt_tokens: int) -> float:
        step, row, token = self._costs
        return (step + row * decoding + token * prompt_tokens) * self._random.uniform(0.95, 1.05)


@given(machines, st.integers(2, 64))
def test_a_long_prompt_costs_others_no_more_than_half_their_speed(
    costs: tuple[float, float, float, int], decoding: int
) -> None:
    machine, pace = Machine(*costs), PrefillBudget()
    pace.learn(0, 512, machine.seconds(0, 512))
    for _ in range(50):
        pace.learn(decoding, 0, machine.seconds(decoding, 0))
    left, steps = 4096, 0
    undisturbed = machine.seconds(decoding, 0)
    while left > 0:
        allowed = pace.prompt_tokens(decoding, [left], 512)
        assert allowed is not None
        taken = min(left, allowed)
        seconds = machine.seconds(decoding, taken)
        if taken > MIN_PREFILL_TOKENS:
            # A first estimate counts the step's own overhead among the prompt's tokens, so it errs on the short side.
            assert seconds < 2 * undisturbed
        pace.learn(decoding, taken, seconds)
        left, steps = left - taken, steps + 1
    with_prompt = 4096 // MIN_PREFILL_TOKENS
    assert steps <= with_prompt + with_prompt // STEPS_BETWEEN_MEASUREMENTS + 1


@given(machines, st.integers(2, 64), st.floats(0.2, 5.0), st.integers(0, 40))
def test_what_rows_in_decode_took_with_other_contexts_does_not_hold_a_prompt_back(
    costs: tuple[float, float, float, int], decoding: int, wrong: float, mixed: int
) -> None:
    machine, pace = Machine(*costs), PrefillBudget()
    pace.learn(0, 512, machine.seconds(0, 512))
    alone = machine.seconds(decoding, 0)
    for _ in range(20):
        pace.learn(decoding, 0, wrong * alone)
    for _ in range(mixed):
        pace.learn(decoding, 512 - decoding, machine.seconds(decoding, 512 - decoding))
    for _ in range(10 * STEPS_BETWEEN_MEASUREMENTS):
        allowed = pace.prompt_tokens(decoding, [4096], 512)
        assert allowed is not None
        pace.learn(decoding, allowed, machine.seconds(decoding, allowed))
    allowed = pace.prompt_tokens(decoding, [4096], 512) or pace.prompt_tokens(decoding, [4096], 512)
    assert allowed is not None
    # Of a step of 512 tokens nobody can tell what the step itself takes, so a token may be thought dearer than it is.
    assert allowed >= 0.6 * PREFILL_SHARE * alone / (machine.seconds(0, 512) / 512)
    assert allowed <= max(1.2 * alone / costs[2], MIN_PREFILL_TOKENS)


def test_rows_in_decode_are_measured_alone_once_when_it_is_time() -> None:
    pace = PrefillBudget()
    pace.learn(0, 512, 0.512)
    pace.learn(4, 0, 0.1)
    for _ in range(STEPS_BETWEEN_MEASUREMENTS):
        assert pace.prompt_tokens(4, [4096], 512) == 60
        pace.learn(4, 60, 0.16)
    # Results come a step or two later than the next ones are asked for.
    assert pace.prompt_tokens(4, [4096], 512) == 0
    assert pace.prompt_tokens(4, [4096], 512) == 60
    pace.learn(4, 0, 0.15)
    assert pace.prompt_tokens(4, [4096], 512) == 72


@given(machines, st.integers(1, 64), st.lists(st.integers(2, 5000), min_size=2, max_size=64))
def test_several_short_prompts_are_not_held_back(
    costs: tuple[float, float, float, int], decoding: int, left: list[int]
) -> None:
    machine, pace = Machine(*costs), PrefillBudget()
    pace.learn(0, 512, machine.seconds(0, 512))
    pace.learn(decoding, 0, machine.seconds(decoding, 0))
    free = pace.prompt_tokens(decoding, left, 512) is None
    assert free == (sum(left) <= 512 * len(left))


@given(st.integers(1, 64), st.integers(1, 64))
def test_each_of_many_long_prompts_counts_as_four_rows(decoding: int, prompts: int) -> None:
    pace = PrefillBudget()
    pace.learn(0, 512, 0.512)
    pace.learn(decoding, 0, 0.1)
    allowed = pace.prompt_tokens(decoding, [4096] * prompts, 512)
    assert allowed is not None
    exact = 60 if prompts == 1 or 4 * prompts <= decoding else 60 * 4 * prompts / decoding
    assert exact - 1.001 <= allowed <= exact + 0.001


def test_what_is_not_known_limits_nothing() -> None:
    pace = PrefillBudget()
    assert pace.prompt_tokens(4, [900], 512) is None
    pace.learn(4, 0, 0.01)
    assert pace.prompt_tokens(4, [900], 512) is None
    pace.learn(0, 100, 0.1)
    assert pace.prompt_tokens(4, [900], 512) is not None


def test_one_slow_step_does_not_count_for_more_than_it_may() -> None:
    pace = PrefillBudget()
    pace.learn(0, 100, 0.1)
    for _ in range(20):
        pace.learn(4, 0, 0.1)
    pace.learn(4, 0, 100.0)
    allowed = pace.prompt_tokens(4, [900], 512)
    assert allowed is not None
    assert 60 <= allowed <= 72


class Deaf(PrefillBudget):
    """Keeps to what it was told: the clock of a test says nothing about made-up costs."""

    def __init__(self) -> None:
        super().__init__()
        super().learn(0, 64, 6.4)
        super().learn(2, 0, 2.5)  # three fifths of it are 15 tokens of a prompt

    def learn(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        pass


def test_steps_follow_the_pace_beside_decode_only() -> None:
    yard = Yard(replace(LIMITS, max_batch_tokens=64), num_blocks=400, max_model_len=400)
    yard.scheduler.workers[0].prefill_budget = Deaf()
    for handle in (1, 3):
        yard.submit(handle, [handle] * 3, 60, [])
    while not (yard.tokens[1] and yard.tokens[3]):
        yard.turn()
    yard.submit(2, list(range(100, 300)), 5, [])
    counts = []
    while 2 not in yard.tokens:
        for _, step in yard.scheduler.next_steps():
            counts += [] if step.ntok is None else [int(step.ntok.max())]
            yard.in_flight[0].append(step)
        yard.scheduler.step_result(yard.workers[0].run(yard.in_flight[0].popleft()))
        yard._read_results()
    assert counts == [15] * 13 + [5]
