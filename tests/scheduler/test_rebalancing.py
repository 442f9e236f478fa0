"""A worker that runs far more sequences than another one hands some over, with the K and V that they have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interfaces import SamplingParams, Submit, TextContext
from scheduler import placement_cost, rebalancing, shipping
from scheduler.placement_cost import ROWS_APART
from tests.scheduler.simulated_worker import SimulatedWorker, naive_generate
from tests.scheduler.test_core import LIMITS, REPLICA, Yard, prompts
from tests.scheduler.test_shipping import computed_on

COUNT = 14
# The least of the greatest lengths of workers in random walks.
SHORTEST = 50
ANSWER = 250


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "PIECE_BYTES", 3 * 4 * 8)


def prompt_of(handle: int) -> list[int]:
    return [(handle + 1) * 31 + position for position in range(20 + handle)]


def slow_to_compute(yard: Yard, index: int) -> None:
    """Let a worker be known for a second a token: copies pay."""
    for _ in range(60):
        yard.scheduler.workers[index].prefill_budget.learn(0, 10, 10.0)


class Crowded:
    """Worker 0 computes slowly, and has `COUNT` sequences in the midst of their answers; worker 1 is new."""

    def __init__(self, answer: int = ANSWER) -> None:
        self.yard = Yard(LIMITS, 1, max_model_len=400, num_blocks=1000)
        self.answer = answer
        for handle in range(COUNT):
            params = SamplingParams(seed=handle, max_new_tokens=answer)
            context = TextContext.from_prompt(prompt_of(handle), params, request_id=f"stream-{handle}")
            self.yard.scheduler.submit(REPLICA, Submit(handle, context))
        self.until(lambda: len(self.yard.tokens) == COUNT and min(map(len, self.yard.tokens.values())) >= 5)
        slow_to_compute(self.yard, 0)
        self.join()
        self.left = computed_on(self.yard, 1)

    def join(self) -> None:
        self.yard.start_worker(1, 0)

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(100_000):
            if condition():
                return
            self.yard.turn()
        raise AssertionError("it does not happen")

    @property
    def moved(self) -> int:
        return self.yard.scheduler.status().counters["rebalanced"]

    def running(self) -> list[int]:
        return [worker.rows.running for worker in self.yard.scheduler.workers.values()]

    def finish(self, but: int = -1) -> None:
        self.yard.drain()
        for handle in range(COUNT):
            wanted = naive_generate(prompt_of(handle), handle, [], len(prompt_of(handle)) + self.answer)
            assert self.yard.tokens[handle] == wanted or handle == but
        for worker in self.yard.scheduler.workers.values():
            assert worker.pool.used == worker.rows.running == len(worker.arrivals.open) == 0
            assert not self.yard.scheduler.rebalancing.held(worker)


def test_a_worker_that_joins_gets_running_sequences_and_computes_nothing_anew() -> None:
    crowded = Crowded()
    crowded.until(lambda: crowded.running()[0] - crowded.running()[1] <= ROWS_APART)
    moved = crowded.moved
    assert moved == crowded.running()[1] == 3, "as many as it takes, and no more"
    crowded.finish()
    assert crowded.moved == moved
    # Tokens of steps that were in flight are drawn again.
    assert len(crowded.left) == moved
    assert max(crowded.left) <= 1 + LIMITS.steps_in_flight
    stories = [" | ".join(crowded.yard.scheduler.request_log.of(f"stream-{handle}")) for handle in range(COUNT)]
    story = next(story for story in stories if "it moves" in story)
    assert "worker 0 runs 14, and worker 1 only 0: it moves, with the K and V of" in story
    assert "more are sent by worker 0" in story
    assert "tokens came from worker 0 in" in story
    counters = crowded.yard.scheduler.status().counters
    assert counters["shipped_tokens"] > 20 * moved
    assert counters["preemptions"] == counters["recovered"] == counters["handed_over"] == 0


@pytest.mark.parametrize(
    "keeps",
    [
        lambda yard: yard.scheduler.workers[1].prefill_budget.learn(0, 1000, 1e-6),
        lambda yard: yard.scheduler.workers[0].prefill_budget.learn(0, 1000, 1e-6),
    ],
    ids=["the new worker computes faster", "the other one computes faster, and the new one is not known"],
)
def test_a_copy_that_is_slower_than_computing_moves_none(keeps: Callable[[Yard], None]) -> None:
    crowded = Crowded()
    target = crowded.yard.scheduler.workers[1]
    target.arrivals.learn(10, 100.0)
    for _ in range(60):
        keeps(crowded.yard)
    crowded.finish()
    assert crowded.moved == 0


class Apart(Crowded):
    def join(self) -> None:
        super().join()
        hello = self.yard.workers[1].hello
        self.yard.scheduler.worker_hello(replace(hello, kv_form=self.form))

    form = ""


class Unlike(Apart):
    form = "another"


@pytest.mark.parametrize("kind", [Apart, Unlike])
def test_workers_that_cannot_use_the_blocks_get_none(kind: type[Apart]) -> None:
    crowded = kind()
    crowded.finish()
    assert crowded.moved == 0


def test_none_moves_that_is_about_to_end_or_while_requests_wait() -> None:
    crowded = Crowded(answer=rebalancing.LEAST_LEFT)
    crowded.finish()
    assert crowded.moved == 0
    crowded = Crowded()
    scheduler = crowded.yard.scheduler
    scheduler.rebalancing.advance(may_move=False)
    assert crowded.moved == 0, "while the weights change"
    params = SamplingParams(seed=COUNT, max_new_tokens=3)
    scheduler.submit(REPLICA, Submit(COUNT, TextContext.from_prompt([1, 2, 3], params)))
    scheduler.rebalancing.advance(may_move=True)
    assert crowded.moved == 0, "a request waits, which may go to the new worker"
    crowded.until(lambda: crowded.moved > 0)
    crowded.finish()


def under_way() -> Crowded:
    crowded = Crowded()
    target = crowded.yard.scheduler.workers[1]
    crowded.until(lambda: target.arrivals.blocks > 0 and bool(target.arrivals.open))
    return crowded


def test_the_end_of_either_worker_meanwhile_loses_nothing() -> None:
    for index in (0, 1):
        crowded = under_way()
        crowded.yard.start_worker(index, 1)
        crowded.yard.turn()
        scheduler = crowded.yard.scheduler
        assert all(sequence.elsewhere is None or not index for sequence in scheduler.replicas.all_sequences())
        assert not scheduler.rebalancing.held(scheduler.workers[0])
        crowded.finish()


def test_a_sequence_that_is_cancelled_meanwhile_leaves_nothing() -> None:
    crowded = under_way()
    [arrival] = crowded.yard.scheduler.workers[1].arrivals.open
    handle = crowded.yard.scheduler.workers[1].rows.sequence(arrival.row).handle
    crowded.yard.cancel(handle)
    crowded.finish(but=handle)


def test_the_blocks_that_are_sent_stay_until_they_are() -> None:
    crowded = under_way()
    scheduler = crowded.yard.scheduler
    held = scheduler.rebalancing.held(scheduler.workers[0])
    assert held
    pool = scheduler.workers[0].pool
    taken = pool.allocate(pool.available)
    assert not set(taken) & set(held)
    pool.release(taken)
    crowded.finish()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_walks(monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    """Sequences move all the time; workers die, leave and come; pieces are lost; requests are cancelled.

    Workers differ in their blocks, rows, lengths and forms. A worker with a smaller length ends sequences earlier.
    """
    monkeypatch.setattr(placement_cost, "ROWS_APART", 1)
    monkeypatch.setattr(rebalancing, "LEAST_LEFT", 2)
    monkeypatch.setattr(rebalancing, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(rebalancing, "LASTING_SECONDS", 0.0)
    limits = replace(
        LIMITS,
        steps_in_flight=data.draw(st.integers(1, 2)),
        most_guesses=data.draw(st.integers(0, 4)),
        max_batch_tokens=data.draw(st.integers(4, 40)),
        max_running=data.draw(st.integers(3, 8)),
        prefix_cache=data.draw(st.booleans()),
        min_awaited_tokens=data.draw(st.sampled_from([8, 128])),
    )
    seed = data.draw(st.integers(0, 2**32))
    slots = data.draw(st.sampled_from([0, 20]))
    yard = Yard(limits, 1, seed, num_blocks=data.draw(st.integers(30, 80)), spill_slots=slots)
    losing = data.draw(st.sampled_from([0.0, 0.1]))

    shapes = st.fixed_dictionaries(
        {
            "num_blocks": st.integers(30, 80),
            "max_rows": st.integers(1, 8),
            "max_model_len": st.sampled_from([SHORTEST, 80, 80]),
        }
    )

    def start(index: int, epoch: int) -> None:
        worker = SimulatedWorker(index, epoch, **{**yard.shape, **data.draw(shapes)})
        worker.hello = replace(
            worker.hello, kv_form=data.draw(st.sampled_from(["simulated", "simulated", "another", ""]))
        )
        worker.losing = losing
        yard.workers[index] = worker
        yard.in_flight[index].clear()
        assert yard.scheduler.worker_hello(worker.hello)
        slow_to_compute(yard, index)

    slow_to_compute(yard, 0)
    asked = prompts(12, seed)
    epochs = [0, -1, -1]
    for handle, prompt in enumerate(asked):
        yard.submit(handle, prompt, max_new_tokens=data.draw(st.integers(5, 45)), stop_token_ids=[3, 4])
        for _ in range(data.draw(st.integers(0, 20))):
            yard.turn()
        if data.draw(st.integers(0, 5)) == 0:
            yard.cancel(data.draw(st.integers(0, handle)))
        index = data.draw(st.integers(0, 2))
        event = data.draw(st.integers(0, 5))
        here = index in yard.workers
        if (event == 2 if here else event < 2) and epochs[index] < 2:
            epochs[index] += 1
            start(index, epochs[index])
        elif event == 3 and here and len(yard.workers) > 1:
            yard.leave(index)
    yard.start_worker(3, 0)
    yard.drain()
    for handle, prompt in enumerate(asked):
        wanted = naive_generate(prompt, handle, [3, 4], min(len(prompt) + yard.max_new[handle], 80))
        came = yard.tokens[handle]
        assert came == wanted[: len(came)]
        if handle in yard.finished:
            assert came == wanted or len(prompt) + len(came) >= SHORTEST
    for worker in yard.scheduler.workers.values():
        assert worker.pool.used == worker.rows.running == len(worker.arrivals.open) == 0
        assert not yard.scheduler.rebalancing.held(worker)
