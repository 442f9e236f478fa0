"""The budget takes the guesses that pay on any processor: it learns what they cost and what they are worth."""

from __future__ import annotations

import numpy as np
import pytest

from model_worker.drafters.base import Proposal
from model_worker.drafters.budget import LearntBudget
from model_worker.drafters.hit_rates import HitRates
from model_worker.drafters.pass_times import MOST_TOKENS, PassTimes


class Machine:
    """A pass of T tokens takes `base + each * T` seconds. Serves as a worker would: it does what the budget says."""

    def __init__(self, base: float, each: float, most: int = 7) -> None:
        self.times = PassTimes()
        self.budget = LearntBudget(most, self.times)
        self.rates = HitRates()
        self.seconds = 0.0
        self.tokens = 0
        # Passes with guesses.
        self.guessed = 0
        self._base = base
        self._each = each
        self._most = most

    def serve(self, rows: int, chance: float, steps: int, rng: np.random.Generator) -> None:
        """So many steps of so many rows, whose guesses are each right with the same chance."""
        for _ in range(steps):
            proposal = Proposal(np.zeros(self._most, np.int32), np.ones(self._most))
            reaches = {row: self.rates.reach(row, "test", proposal) for row in range(rows)}
            self.budget.begin(rows)
            counts = {} if self.budget.hopeless(rows, True) else self.budget.choose(rows, reaches, True, final=True)
            total = rows + sum(counts.values())
            seconds = self._base + self._each * total
            self.seconds += seconds
            self.tokens += rows
            self.guessed += bool(counts)
            self.times.computed(total, seconds)
            for row, count in counts.items():
                hits = rng.random(count) < chance
                right = count if hits.all() else int(np.argmin(hits))
                self.tokens += right
                self.rates.learn(row, "test", proposal, count, right)
                self.budget.learn(float(reaches[row][:count].sum()), right)

    def gain(self, rows: int) -> float:
        """How many times as fast it was as without guesses."""
        plain = self.tokens / rows * (self._base + self._each * rows)
        return plain / self.seconds


@pytest.mark.parametrize(
    ("rows", "base", "each", "chance", "least"),
    [
        (1, 1.0, 0.1, 0.9, 2.5),  # one stream, text that repeats
        (1, 1.0, 0.3, 0.9, 1.4),
        (1, 1.0, 0.1, 0.0, 0.97),  # text that seems to repeat, and never does
        (1, 1.0, 1.0, 0.5, 0.97),
        (16, 1.0, 0.3, 0.5, 0.97),  # a full batch
        (16, 1.0, 0.3, 0.0, 0.97),
        (64, 0.2, 1.0, 0.9, 0.97),
    ],
)
def test_guesses_pay_or_are_not_made(rows: int, base: float, each: float, chance: float, least: float) -> None:
    machine = Machine(base, each)
    machine.serve(rows, chance, 1500, np.random.default_rng(1))
    assert machine.gain(rows) > least


@pytest.mark.parametrize("chance", [0.1, 0.2, 0.3, 0.4])
def test_single_right_guesses_of_text_that_does_not_repeat_bring_no_trial_forward(chance: float) -> None:
    """A trial costs more than its tokens: the next step is not launched before this one's are read."""
    machine = Machine(1.0, 0.4)
    machine.serve(16, chance, 640, np.random.default_rng(1))
    guessed = machine.guessed
    machine.serve(16, chance, 640, np.random.default_rng(2))
    assert machine.guessed - guessed <= 8
    assert machine.gain(16) > 0.995


def test_what_has_changed_is_learnt_anew() -> None:
    rng = np.random.default_rng(1)
    machine = Machine(1.0, 0.1)
    machine.serve(1, 0.0, 500, rng)
    machine.seconds = machine.tokens = 0
    machine.serve(1, 0.95, 2000, rng)
    assert machine.gain(1) > 1.5
    machine._each = 2.0
    machine.serve(1, 0.95, 200, rng)
    machine.seconds = machine.tokens = 0
    machine.serve(1, 0.95, 1000, rng)
    assert machine.gain(1) > 0.9


def test_a_row_gets_its_guesses_in_order_and_the_surer_row_more() -> None:
    times = PassTimes()
    for tokens in range(1, 20):
        times.computed(tokens, 1.0 + 0.25 * tokens)
    budget = LearntBudget(7, times)
    reaches = {5: np.array([0.95, 0.9, 0.85, 0.8]), 6: np.array([0.2, 0.1])}
    counts = budget.choose(2, reaches, True, final=True)
    assert counts == {5: 4}


def test_nothing_is_guessed_before_a_pass_was_measured_nor_in_a_batch_that_is_too_large() -> None:
    budget = LearntBudget(7, PassTimes())
    assert budget.hopeless(1, True)
    times = PassTimes()
    times.computed(1, 1.0)
    assert not LearntBudget(7, times).hopeless(1, True)
    assert LearntBudget(7, times).hopeless(MOST_TOKENS, True)


def test_times_lie_between_their_neighbours_and_outliers_count_little() -> None:
    times = PassTimes()
    for _ in range(10):
        times.computed(1, 1.0)
        times.computed(8, 2.0)
    times.computed(1, 50.0)
    seconds = times.seconds(1, 12)
    assert seconds is not None
    assert 1.0 <= seconds[0] < 1.2
    assert seconds[7] == pytest.approx(2.0)
    assert (np.diff(seconds) >= 0).all()
    assert seconds[11] > 2.0


def test_the_time_of_an_overlapped_pass_begins_with_the_end_of_the_one_before() -> None:
    times = PassTimes()
    times.overlapped(1, launched=10.0, ended=11.0)
    times.overlapped(1, launched=10.1, ended=12.0)
    times.overlapped(1, launched=20.0, ended=21.0)
    seconds = times.seconds(1, 1)
    assert seconds is not None
    assert seconds[0] == pytest.approx(1.0)


def test_rates_are_learnt_by_depth_and_by_how_sure_the_drafter_is() -> None:
    rates = HitRates()
    sure = Proposal(np.zeros(4, np.int32), np.ones(4), sureness=3)
    unsure = Proposal(np.zeros(4, np.int32), np.ones(4), sureness=1)
    for row in range(100):
        rates.learn(row, "test", sure, 4, 2)
        rates.learn(row, "test", unsure, 4, 0)
    reach = rates.reach(1000, "test", sure)
    assert reach[1] > 0.9
    assert reach[2] < 0.1
    assert rates.reach(1000, "test", unsure)[0] < 0.1
    for _ in range(5):
        rates.learn(7, "test", sure, 1, 0)
    assert rates.reach(7, "test", sure)[0] < 0.6 < rates.reach(8, "test", sure)[0]
    rates.forget_row(7)
    assert rates.reach(7, "test", sure)[0] > 0.6
