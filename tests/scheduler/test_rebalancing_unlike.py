"""Workers that are unlike: a crowded one hands sequences over to those only that can run them to their ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from interfaces import LOWEST_PRIORITY, SamplingParams, SchedulingOptions, Submit, TextContext
from scheduler import shipping
from scheduler.copy_time import HALF_LIFE
from scheduler.placement_cost import least_cost
from tests.scheduler.adapter_yard import SIZE, AdapterYard
from tests.scheduler.simulated_worker import SimulatedWorker, naive_generate
from tests.scheduler.test_core import REPLICA
from tests.scheduler.test_rebalancing import ANSWER, COUNT, Crowded, prompt_of, slow_to_compute

FORM = "simulated"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "PIECE_BYTES", 3 * 4 * 8)


class Beside(Crowded):
    """The workers from index 1 on have these forms and shapes."""

    def __init__(self, *others: tuple[str, dict[str, int]], answer: int = ANSWER) -> None:
        self.others = others
        super().__init__(answer)

    def join(self) -> None:
        for index, (form, shape) in enumerate(self.others, 1):
            worker = SimulatedWorker(index, 0, **{**self.yard.shape, **shape})
            worker.hello = replace(worker.hello, kv_form=form)
            self.yard.workers[index] = worker
            assert self.yard.scheduler.worker_hello(worker.hello)

    def ask(self, handle: int, index: int, answer: int, priority: int = 0) -> None:
        """Place a request on this worker."""
        scheduler = self.yard.scheduler
        scheduler.policy = lambda workers, sequence, most: [
            choice for choice in least_cost(workers, sequence, most) if choice.worker.hello.index == index
        ]
        context = TextContext.from_prompt(prompt_of(handle), SamplingParams(seed=handle, max_new_tokens=answer))
        scheduler.submit(REPLICA, Submit(handle, context, SchedulingOptions(priority=priority)))
        self.yard.turn()
        scheduler.policy = least_cost
        slow_to_compute(self.yard, index)

    def for_a_while(self) -> None:
        """Longer than it takes until a sequence moves."""
        until = self.yard.clock.now + 2.0
        self.until(lambda: self.yard.clock.now > until)


@pytest.mark.parametrize("longest", [60, 200, 20 + COUNT - 2 + ANSWER])
def test_none_moves_where_it_would_end_earlier(longest: int) -> None:
    crowded = Beside((FORM, {"max_model_len": longest}))
    crowded.for_a_while()
    moved = [sequence for sequence in crowded.yard.scheduler.replicas.all_sequences() if sequence.moved]
    assert len(moved) == crowded.moved == (3 if longest > 200 else 0)
    assert all(sequence.limit(400) <= longest for sequence in moved)
    crowded.finish()


@pytest.mark.parametrize(
    ("others", "running"),
    [
        ([("another", {}), (FORM, {})], [11, 0, 3]),
        ([("", {}), (FORM, {})], [11, 0, 3]),
        ([(FORM, {"num_blocks": 5}), (FORM, {})], [11, 0, 3]),
        ([("another", {}), ("another", {})], [14, 0, 0]),
    ],
    ids=["another form", "no form", "no blocks", "none"],
)
def test_a_worker_that_can_take_none_keeps_no_other_from_it(
    others: list[tuple[str, dict[str, int]]], running: list[int]
) -> None:
    crowded = Beside(*others)
    crowded.for_a_while()
    assert crowded.running() == running
    crowded.finish()


def test_a_worker_without_a_free_row_keeps_no_other_from_it() -> None:
    """Rows of one worker may have numbers that another one has not."""
    crowded = Beside((FORM, {"max_rows": 1}), (FORM, {}))
    crowded.ask(COUNT, 1, ANSWER)
    crowded.ask(COUNT + 1, 2, ANSWER)
    crowded.ask(COUNT + 2, 2, ANSWER)
    assert crowded.running() == [COUNT, 1, 2]
    crowded.for_a_while()
    assert crowded.running() == [COUNT - 2, 1, 4], "the one that runs fewest is full"
    crowded.finish()


def test_batches_make_room_for_those_that_move() -> None:
    crowded = Beside((FORM, {"max_rows": 2}))
    for handle in range(COUNT, COUNT + 2):
        crowded.ask(handle, 1, 300, LOWEST_PRIORITY)
    worker = crowded.yard.scheduler.workers[1]
    assert worker.rows.background == 2
    crowded.for_a_while()
    assert (crowded.moved, worker.rows.running, worker.rows.background) == (2, 2, 0)
    assert crowded.yard.scheduler.counters["preemptions"] == 2
    crowded.finish()
    for handle in range(COUNT, COUNT + 2):
        assert crowded.yard.tokens[handle] == naive_generate(
            prompt_of(handle), handle, [], len(prompt_of(handle)) + 300
        )


def test_requests_that_come_all_the_time_and_find_a_place_keep_none_from_moving() -> None:
    crowded = Beside((FORM, {}))
    handle = COUNT
    until = crowded.yard.clock.now + 2.0
    while crowded.yard.clock.now < until:
        params = SamplingParams(seed=handle, max_new_tokens=1)
        crowded.yard.scheduler.submit(REPLICA, Submit(handle, TextContext.from_prompt([handle % 900, 1, 2], params)))
        crowded.yard.turn()
        handle += 1
    assert crowded.moved > 0
    crowded.finish()


@pytest.mark.parametrize("index", [0, 1], ids=["sent", "taken"])
def test_where_copies_fail_sequences_stay(index: int) -> None:
    crowded = Beside((FORM, {}))
    crowded.yard.workers[index].losing = 1.0
    slow_to_compute(crowded.yard, 1)
    crowded.for_a_while()
    assert crowded.moved == 1, "the first one is computed anew; no other one is"
    assert crowded.yard.scheduler.status().counters["shipped_tokens"] == 0
    crowded.yard.workers[index].losing = 0.0
    crowded.yard.clock.advance(10 * HALF_LIFE)
    slow_to_compute(crowded.yard, 1)
    crowded.until(lambda: crowded.moved > 1)
    crowded.finish()


def test_a_row_with_an_adapter_moves_only_where_that_is_read() -> None:
    yard = AdapterYard(3 * SIZE, num_blocks=4000, max_model_len=800)
    scheduler = yard.scheduler
    yard.load("a", 1)
    yard.load("b", 2)

    def until_token(*handles: int) -> None:
        while not all(len(yard.tokens[handle]) > 5 for handle in handles):
            assert yard.turn()

    def for_a_while(seconds: float = 2.0) -> None:
        until = yard.clock.now + seconds
        while yard.clock.now < until:
            assert yard.turn()

    for handle in range(COUNT):
        yard.ask(handle, prompt_of(handle), 600, "a")
    until_token(*range(COUNT))
    slow_to_compute(yard, 0)
    yard.memory = SIZE
    yard.start_worker(1, 0)
    yard.memory = 3 * SIZE
    for_a_while(0.2)
    scheduler.policy = lambda workers, sequence, most: [
        choice for choice in least_cost(workers, sequence, most) if choice.worker.hello.index == 1
    ]
    yard.ask(COUNT, [1, 2, 3], 600, "b")
    until_token(COUNT)
    scheduler.policy = least_cost
    other = scheduler.workers[1]
    assert other.rows.running == 1
    for_a_while()
    assert [other.rows.running, scheduler.counters["rebalanced"]] == [1, 0], "its memory is full of another adapter"
    assert not any(sequence.moved for sequence in scheduler.replicas.all_sequences())
    yard.cancel(COUNT)
    yard.ask(COUNT + 1, [1, 2, 3], 3, "a")
    slow_to_compute(yard, 1)
    for_a_while()
    assert 0 < scheduler.counters["rebalanced"] == other.rows.running
    yard.settle()
    for handle in [*range(COUNT), COUNT + 1]:
        assert yard.tokens[handle] == yard.expected(handle)
