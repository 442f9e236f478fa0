"""The order of the queue: first those that ran before, then priorities, then fair shares by tokens."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interfaces import LOWEST_PRIORITY, Finish, SamplingParams, SchedulingOptions, Submit, TextContext
from scheduler.sequence import Sequence
from scheduler.waiting_queue import WaitingQueue
from tests.scheduler.simulated_worker import naive_generate
from tests.scheduler.test_core import LIMITS, REPLICA, Yard


def sequence(order: int, tokens: int = 1, **scheduling: object) -> Sequence:
    context = TextContext.from_prompt([1] * tokens, SamplingParams(seed=0))
    return Sequence.of(REPLICA, Submit(order, context, SchedulingOptions(**scheduling)), order)  # type: ignore[arg-type]


def served(queue: WaitingQueue, count: int) -> list[Sequence]:
    """Takes `count` requests, each of which is charged its prompt, as at placement."""
    taken: list[Sequence] = []

    def place(one: Sequence) -> bool:
        if len(taken) == count:
            return False
        queue.charge(one, len(one.tokens))
        taken.append(one)
        return True

    queue.take_while(place)
    return taken


@given(st.lists(st.integers(1, 50), max_size=30))
def test_one_tenant_is_served_in_order_of_arrival(sizes: list[int]) -> None:
    queue = WaitingQueue()
    for order, size in enumerate(sizes):
        queue.add(sequence(order, size))
    assert (len(queue), queue.tokens) == (len(sizes), sum(sizes))
    assert [one.order for one in served(queue, len(sizes))] == list(range(len(sizes)))
    assert (len(queue), queue.tokens) == (0, 0)


@given(st.lists(st.tuples(st.integers(-3, 3), st.sampled_from("abc")), max_size=30), st.randoms())
def test_discarding_takes_out_exactly_that_one(given: list[tuple[int, str]], rng: random.Random) -> None:
    queue = WaitingQueue()
    made = [sequence(i, i % 5 + 1, priority=p, tenant=t) for i, (p, t) in enumerate(given)]
    for one in made:
        queue.add(one)
    gone = [one for one in made if rng.random() < 0.5]
    for one in [*gone, *gone]:
        queue.discard(one)
    left = served(queue, len(made))
    assert {one.order for one in left} == {one.order for one in made} - {one.order for one in gone}
    priorities = [one.scheduling.priority for one in left]
    assert priorities == sorted(priorities, reverse=True)
    assert queue.tokens == 0


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    queue = WaitingQueue()
    for order in range(1000):
        queue.add(sequence(order, 10, tenant="flood"))
    served(queue, 500)
    queue.add(sequence(1000, 10, tenant="quiet"))
    assert 1000 in [one.order for one in served(queue, 2)]


@settings(max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.lists(st.integers(1, 20), min_size=4, max_size=4))
def test_shares_follow_the_weights_whatever_the_sizes(weights: list[int], sizes: list[int]) -> None:
    queue = WaitingQueue()
    for i, weight in enumerate(weights):
        for n in range(80):
            queue.add(sequence(i * 80 + n, sizes[i], tenant=f"t{i}", weight=weight))
    got: Counter[str] = Counter()
    left = Counter({f"t{i}": 80 for i in range(len(weights))})
    while min(left.values()) > 0:
        for one in served(queue, 1):
            got[one.scheduling.tenant] += len(one.tokens)
            left[one.scheduling.tenant] -= 1
    shares = [got[f"t{i}"] / weight for i, weight in enumerate(weights)]
    assert max(shares) - min(shares) <= 2 * max(size / weight for size, weight in zip(sizes, weights, strict=False))


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    queue = WaitingQueue()
    queue.add(sequence(0, 1, tenant="away"))
    served(queue, 1)
    for order in range(1, 300):
        queue.add(sequence(order, 10, tenant="busy"))
    served(queue, 100)
    for order in range(300, 400):
        queue.add(sequence(order, 10, tenant="away"))
    turns = Counter(one.scheduling.tenant for one in served(queue, 100))
    assert 45 <= turns["away"] <= 55


def test_those_that_ran_before_go_first_and_oldest_first() -> None:
    queue = WaitingQueue()
    queue.add(sequence(9, priority=5))
    for order in (4, 2, 3):
        back = sequence(order)
        back.admitted = True
        queue.add(back)
    assert [one.order for one in served(queue, 4)] == [2, 3, 4, 9]


def submit(yard: Yard, handle: int, **scheduling: object) -> None:
    params = SamplingParams(seed=handle, max_new_tokens=30)
    yard.max_new[handle] = 30
    context = TextContext.from_prompt([handle + 1] * 5, params)
    yard.scheduler.submit(REPLICA, Submit(handle, context, SchedulingOptions(**scheduling)))  # type: ignore[arg-type]


def test_a_key_has_its_limit_and_others_are_not_touched() -> None:
    yard = Yard(replace(LIMITS, max_open_per_tenant=2))
    for handle in range(4):
        submit(yard, handle, tenant="greedy")
    submit(yard, 4, tenant="modest")
    yard.drain()
    assert [yard.finished[h] for h in range(5)] == [Finish.LENGTH] * 2 + [Finish.FAILED] * 2 + [Finish.LENGTH]
    assert "2 requests of this key are open" in yard.errors[3]
    submit(yard, 5, tenant="greedy")
    yard.drain()
    assert yard.finished[5] == Finish.LENGTH


def test_the_queue_is_bounded_by_tokens() -> None:
    yard = Yard(replace(LIMITS, max_queued_tokens=12))
    for handle in range(3):
        submit(yard, handle)
    yard.drain()
    assert yard.finished[2] == Finish.FAILED
    assert "requests of 10 tokens wait already" in yard.errors[2]


def test_requests_of_batches_fill_no_queue_for_others() -> None:
    yard = Yard(replace(LIMITS, max_queued=2, max_queued_tokens=12))
    for handle in range(3):
        submit(yard, handle, priority=LOWEST_PRIORITY)
    submit(yard, 3)
    submit(yard, 4)
    submit(yard, 5)
    yard.drain()
    assert [yard.finished[h] for h in range(6)] == [*[Finish.LENGTH] * 2, Finish.FAILED] * 2
    assert (yard.scheduler.waiting.background, yard.scheduler.waiting.background_tokens) == (0, 0)


def test_the_next_part_of_an_answer_is_not_refused_by_a_full_queue() -> None:
    yard = Yard(replace(LIMITS, max_queued=2, max_open_per_tenant=2))
    for handle in range(3):
        context = TextContext.from_prompt([2] * 5, SamplingParams(seed=handle, max_new_tokens=1))
        yard.max_new[handle] = 1
        yard.scheduler.submit(REPLICA, Submit(handle, context, SchedulingOptions(), again=handle == 2))
    yard.drain()
    assert yard.finished == dict.fromkeys(range(3), Finish.LENGTH)


@pytest.mark.parametrize("limit", ["queue_seconds", "total_seconds"])
def test_a_request_whose_time_is_up_fails_and_frees_all(limit: str) -> None:
    yard = Yard(workers=0)
    submit(yard, 0, **{limit: 5.0})
    submit(yard, 1)
    yard.clock.advance(4)
    yard.scheduler.expire()
    yard.drain()
    assert yard.finished == {}
    yard.clock.advance(2)
    yard.scheduler.expire()
    yard.drain()
    assert yard.finished == {0: Finish.FAILED}
    assert "time limit of 5 s" in yard.errors[0]
    yard.start_worker(0, 0)
    yard.drain()
    assert yard.tokens[1] == naive_generate([2] * 5, 1, [], 35)


def test_a_running_request_only_has_its_total_limit() -> None:
    yard = Yard()
    submit(yard, 0, queue_seconds=5.0)
    submit(yard, 1, total_seconds=5.0)
    for _ in range(5):
        yard.turn()
    yard.clock.advance(6)
    yard.scheduler.expire()
    yard.drain()
    assert yard.finished[0] == Finish.LENGTH
    assert yard.finished[1] == Finish.FAILED
    assert 0 < len(yard.tokens[1]) < 30
