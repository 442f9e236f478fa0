"""Prompts beside rows in decode: no row's rhythm is broken, and every prompt comes to its end."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from scheduler.prefill_budget import MIN_PREFILL_TOKENS, PREFILL_SHARE, STEPS_BETWEEN_MEASUREMENTS, PrefillBudget
from tests.scheduler.test_core import LIMITS, Yard

machines = st.tuples(st.floats(1e-3, 0.05), st.floats(1e-5, 5e-3), st.floats(1e-5, 5e-3), st.integers(0, 2**32))


class Machine:
    """A device whose steps take `step` seconds, `row` more for each row in decode, `token` for each of a prompt."""

    def __init__(self, step: float, row: float, token: float, seed: int) -> None:
        self._costs = (step, row, token)
        self._random = random.Random(seed)

    def seconds(self, decoding: int, prompt_tokens: int) -> float:
        step, row, token = self._costs
        return (step + row * decoding + token * prompt_tokens) * self._random.uniform(0.95, 1.05)


@given(machines, st.integers(2, 64))
def test_a_long_prompt_costs_others_no_more_than_half_their_speed(
    costs: tuple[float, float, float, int], decoding: int
) -> None:
    machine = Machine(*costs)
    budget = PrefillBudget()
    budget.learn(0, 512, machine.seconds(0, 512))
    for _ in range(50):
        budget.learn(decoding, 0, machine.seconds(decoding, 0))
    left = 4096
    steps = 0
    undisturbed = machine.seconds(decoding, 0)
    while left > 0:
        allowed = budget.prompt_tokens(decoding, [left], 512)
        assert allowed is not None
        taken = min(left, allowed)
        seconds = machine.seconds(decoding, taken)
        if taken > MIN_PREFILL_TOKENS:
            # A first estimate counts the step's own overhead among the prompt's tokens, so it errs on the short side.
            assert seconds < 2 * undisturbed
        budget.learn(decoding, taken, seconds)
        left -= taken
        steps += 1
    with_prompt = 4096 // MIN_PREFILL_TOKENS
    assert steps <= with_prompt + with_prompt // STEPS_BETWEEN_MEASUREMENTS + 1


@given(machines, st.integers(2, 64), st.floats(0.2, 5.0), st.integers(0, 40))
def test_what_rows_in_decode_took_with_other_contexts_does_not_hold_a_prompt_back(
    costs: tuple[float, float, float, int], decoding: int, wrong: float, mixed: int
) -> None:
    machine = Machine(*costs)
    budget = PrefillBudget()
    budget.learn(0, 512, machine.seconds(0, 512))
    alone = machine.seconds(decoding, 0)
    for _ in range(20):
        budget.learn(decoding, 0, wrong * alone)
    for _ in range(mixed):
        budget.learn(decoding, 512 - decoding, machine.seconds(decoding, 512 - decoding))
    for _ in range(10 * STEPS_BETWEEN_MEASUREMENTS):
        allowed = budget.prompt_tokens(decoding, [4096], 512)
        assert allowed is not None
        budget.learn(decoding, allowed, machine.seconds(decoding, allowed))
    allowed = budget.prompt_tokens(decoding, [4096], 512) or budget.prompt_tokens(decoding, [4096], 512)
    assert allowed is not None
    # The time of a step of 512 tokens includes the step itself, so a token may seem dearer. Times vary by 5 %, which is
    # much beside a cheap token when there are many rows. The worst of 12,000 random machines got 0.31 of this.
    assert allowed >= 0.25 * PREFILL_SHARE * alone / (machine.seconds(0, 512) / 512)
    assert allowed <= max(1.2 * alone / costs[2], MIN_PREFILL_TOKENS)


def test_rows_in_decode_are_measured_alone_once_when_it_is_time() -> None:
    budget = PrefillBudget()
    budget.learn(0, 512, 0.512)
    budget.learn(4, 0, 0.1)
    for _ in range(STEPS_BETWEEN_MEASUREMENTS):
        assert budget.prompt_tokens(4, [4096], 512) == 60
        budget.learn(4, 60, 0.16)
    # Results come a step or two later than the next ones are asked for.
    assert budget.prompt_tokens(4, [4096], 512) == 0
    assert budget.prompt_tokens(4, [4096], 512) == 60
    budget.learn(4, 0, 0.15)
    assert budget.prompt_tokens(4, [4096], 512) == 72


@given(machines, st.integers(1, 64), st.lists(st.integers(2, 5000), min_size=2, max_size=64))
def test_several_short_prompts_are_not_held_back(
    costs: tuple[float, float, float, int], decoding: int, left: list[int]
) -> None:
    machine = Machine(*costs)
    budget = PrefillBudget()
    budget.learn(0, 512, machine.seconds(0, 512))
    budget.learn(decoding, 0, machine.seconds(decoding, 0))
    free = budget.prompt_tokens(decoding, left, 512) is None
    assert free == (sum(left) <= 512 * len(left))


@given(st.integers(1, 64), st.integers(1, 64))
def test_each_of_many_long_prompts_counts_as_four_rows(decoding: int, prompts: int) -> None:
    budget = PrefillBudget()
    budget.learn(0, 512, 0.512)
    budget.learn(decoding, 0, 0.1)
    allowed = budget.prompt_tokens(decoding, [4096] * prompts, 512)
    assert allowed is not None
    exact = 60 if prompts == 1 or 4 * prompts <= decoding else 60 * 4 * prompts / decoding
    assert exact - 1.001 <= allowed <= exact + 0.001


def test_what_is_not_known_limits_nothing() -> None:
    budget = PrefillBudget()
    assert budget.prompt_tokens(4, [900], 512) is None
    budget.learn(4, 0, 0.01)
    assert budget.prompt_tokens(4, [900], 512) is None
    budget.learn(0, 100, 0.1)
    assert budget.prompt_tokens(4, [900], 512) is not None


def test_one_slow_step_does_not_count_for_more_than_it_may() -> None:
    budget = PrefillBudget()
    budget.learn(0, 100, 0.1)
    for _ in range(20):
        budget.learn(4, 0, 0.1)
    budget.learn(4, 0, 100.0)
    allowed = budget.prompt_tokens(4, [900], 512)
    assert allowed is not None
    assert 60 <= allowed <= 72


class Fixed(PrefillBudget):
    """Learns nothing after it was made: the test's clock does not know its costs."""

    def __init__(self) -> None:
        super().__init__()
        super().learn(0, 64, 6.4)
        super().learn(2, 0, 2.5)  # three fifths of it are 15 tokens of a prompt

    def learn(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        pass


def test_steps_keep_the_budget_beside_decode_only() -> None:
    yard = Yard(replace(LIMITS, max_batch_tokens=64), num_blocks=400, max_model_len=400)
    yard.scheduler.workers[0].prefill_budget = Fixed()
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
