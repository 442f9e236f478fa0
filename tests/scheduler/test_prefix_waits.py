"""Sequences that wait for blocks which another row fills: nothing is computed twice, and nothing waits for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from interfaces import SamplingParams, Submit, TextContext
from tests.scheduler.simulated_worker import SimulatedWorker, naive_generate
from tests.scheduler.test_core import LIMITS, REPLICA, Yard

PROMPT = list(range(60))
SHARING = replace(LIMITS, min_awaited_tokens=8)


def yard_with(count: int, **shape: int) -> Yard:
    """One worker and `count` requests that differ in their last token."""
    yard = Yard(SHARING, **shape)
    for handle in range(count):
        yard.submit(handle, [*PROMPT, 100 + handle], 5, [])
    return yard


def right(yard: Yard, handles: range) -> None:
    for handle in handles:
        assert yard.tokens[handle] == naive_generate([*PROMPT, 100 + handle], handle, [], 66)


def test_one_of_many_equal_prompts_is_computed() -> None:
    yard = yard_with(8, num_blocks=60)
    yard.drain()
    right(yard, range(8))
    assert yard.cached == dict.fromkeys(range(1, 8), 60)
    worker = yard.scheduler.workers[0].beginnings
    assert (worker.placed_tokens, worker.saved_tokens) == (8 * 61, 7 * 60)
    assert yard.scheduler.counters["preemptions"] == 0, "they share the blocks, so all fit in memory together"


def test_a_worker_that_reuses_no_prefixes_computes_each_prompt() -> None:
    yard = yard_with(0, num_blocks=160)
    worker = SimulatedWorker(0, 1, 160, 4, 8, 100, spill_slots=20)
    worker.hello = replace(worker.hello, reuses_prefixes=False)
    yard.workers[0] = worker
    assert yard.scheduler.worker_hello(worker.hello)
    for turn in range(2):
        for handle in range(4 * turn, 4 * turn + 4):
            yard.submit(handle, [*PROMPT, 100 + handle], 5, [])
        yard.drain()
    right(yard, range(8))
    assert not any(yard.cached.values())
    beginnings = yard.scheduler.workers[0].beginnings
    assert (beginnings.placed_tokens, beginnings.saved_tokens) == (8 * 61, 0)
    assert yard.scheduler.workers[0].pool.cached == 0
    assert not beginnings.spilled_rows.spill.slots


def test_a_row_runs_as_soon_as_the_step_that_fills_its_blocks_is_sent() -> None:
    yard = yard_with(0, num_blocks=60)
    yard.submit(0, PROMPT, 5, [])
    yard.submit(1, [*PROMPT[:16], 300], 5, [])
    yard.submit(2, [*PROMPT[:20], 300], 5, [])
    first, second = (yard.scheduler.next_steps()[0][1] for _ in range(2))
    assert [join.row for join in first.joins] == [0]
    assert [(join.row, join.start) for join in second.joins] == [(1, 16)], "row 2 waits for 4 tokens more"


@pytest.mark.parametrize("turns", range(6))
def test_the_next_in_line_computes_what_a_cancelled_one_did_not(turns: int) -> None:
    yard = yard_with(5, num_blocks=80)
    for _ in range(turns):
        yard.turn()
    yard.cancel(0)
    yard.drain()
    right(yard, range(1, 5))
    saved = yard.scheduler.workers[0].beginnings.saved_tokens
    assert saved >= 3 * 60, "the others wait for the first of them that is left"


def test_waiting_sequences_can_be_cancelled_and_retracted() -> None:
    yard = yard_with(5, num_blocks=80)
    yard.turn()
    yard.cancel(3)
    assert yard.scheduler.retract() == 4
    yard.turn()
    yard.cancel(1)
    yard.drain()
    right(yard, range(1))
    right(yard, range(4, 5))


def test_a_lost_worker_gives_waiting_sequences_back() -> None:
    yard = yard_with(5, num_blocks=80)
    yard.turn()
    yard.start_worker(0, epoch=1)
    yard.drain()
    right(yard, range(5))


def test_a_short_beginning_is_not_waited_for() -> None:
    yard = Yard(replace(LIMITS, min_awaited_tokens=64), num_blocks=200)
    for handle in range(3):
        yard.submit(handle, [*PROMPT, 100 + handle], 5, [])
    (_, step), *_ = yard.scheduler.next_steps()
    assert len(step.joins) == 3


def test_other_salts_and_lone_sequences_wait_for_no_one() -> None:
    yard = yard_with(1, num_blocks=200)
    params = SamplingParams(seed=1, max_new_tokens=5)
    salted = TextContext.from_prompt([*PROMPT, 101], params, cache_salt="tenant")
    yard.scheduler.submit(REPLICA, Submit(1, salted))
    (_, step), *_ = yard.scheduler.next_steps()
    assert len(step.joins) == 2


def test_random_prompts_with_common_beginnings_give_what_each_gives_alone() -> None:
    for seed in range(20):
        yard = Yard(replace(SHARING, min_awaited_tokens=4), workers=2, seed=seed, num_blocks=50)
        asked = {}
        for handle in range(24):
            shared = yard.random.choice([0, 8, 13, 30, 45])
            own = [yard.random.randrange(500) for _ in range(yard.random.randint(1, 12))]
            asked[handle] = [*PROMPT[:shared], *own]
            yard.submit(handle, asked[handle], 12, [])
            for _ in range(yard.random.choice([0, 0, 1, 4])):
                yard.turn()
            if yard.random.random() < 0.15:
                gone = yard.random.choice(list(asked))
                yard.cancel(gone)
                asked.pop(gone)
            if handle == 12:
                yard.start_worker(0, epoch=1)
        yard.drain()
        for handle, prompt in asked.items():
            assert yard.tokens[handle] == naive_generate(prompt, handle, [], len(prompt) + 12), f"seed {seed}"


def test_no_row_waits_for_one_that_reports_its_prompt() -> None:
    yard = Yard(SHARING, num_blocks=80)
    params = SamplingParams(seed=1, max_new_tokens=5)
    asked = TextContext.from_prompt(PROMPT, params, hidden_states=True)
    yard.scheduler.submit(REPLICA, Submit(0, asked))
    yard.submit(1, [*PROMPT, 300], 5, [])
    (_, step), *_ = yard.scheduler.next_steps()
    assert [join.start for join in step.joins] == [0, 0]


def test_a_prompt_that_an_old_row_waits_for_comes_before_younger_ones() -> None:
    """The old one was preempted, or its worker was lost, so it came back after them."""
    yard = Yard(replace(SHARING, max_batch_tokens=8), num_blocks=80)
    yard.submit(0, list(range(200, 240)), 5, [])
    yard.submit(1, PROMPT, 5, [])
    yard.submit(2, [*PROMPT, 300], 5, [])
    yard.turn()
    rows = yard.scheduler.workers[0].rows
    assert rows.awaited[2] == 60
    before = int(rows.num_computed_tokens[0])
    assert before < 40
    rows.order[2] = rows.order[0] - 1
    for _ in range(3):
        yard.turn()
    assert rows.num_computed_tokens[0] == before
    assert rows.num_computed_tokens[1] > 0
