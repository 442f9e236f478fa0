"""Workers that leave: their sequences go on elsewhere, with the K and V that they have, and lose nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interfaces import SamplingParams, Step, StepResult, Submit, TextContext
from scheduler import shipping
from tests.scheduler.simulated_worker import naive_generate
from tests.scheduler.test_core import LIMITS, REPLICA, Yard, prompts

PROMPT = list(range(40))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "PIECE_BYTES", 3 * 4 * 8)


def running(workers: int = 2, **shape: int) -> Yard:
    """A yard whose worker 0 has a sequence in the midst of its answer."""
    yard = Yard(LIMITS, workers, **{"max_model_len": 200, "num_blocks": 100} | shape)
    params = SamplingParams(seed=0, max_new_tokens=60)
    yard.max_new[0] = 60
    yard.scheduler.submit(REPLICA, Submit(0, TextContext.from_prompt(PROMPT, params, request_id="moved")))
    while len(yard.tokens[0]) < 10:
        yard.turn()
    assert yard.scheduler.workers[0].rows.running == 1
    return yard


def finished(yard: Yard) -> str:
    """Let all end. Returns the story of the sequence."""
    yard.drain()
    assert yard.tokens[0] == naive_generate(PROMPT, 0, [], 100)
    for worker in yard.scheduler.workers.values():
        assert worker.pool.used == worker.rows.running == len(worker.arrivals.open) == 0
    return " | ".join(yard.scheduler.request_log.of("moved"))


def computed_on(yard: Yard, index: int) -> list[int]:
    """Tokens of each join of a worker that it must compute, from now on."""
    worker = yard.workers[index]
    run = worker.run
    left: list[int] = []

    def counted(sent: Step) -> StepResult:
        left.extend(len(join.tokens) - join.start for join in sent.joins)
        return run(sent)

    worker.run = counted  # type: ignore[method-assign]
    return left


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_random_walks_with_workers_that_leave(data: st.DataObject) -> None:
    """Workers leave and come, die while they send or take; pieces are lost; requests are cancelled."""
    limits = replace(
        LIMITS,
        steps_in_flight=data.draw(st.integers(1, 2)),
        most_guesses=data.draw(st.integers(0, 4)),
        max_batch_tokens=data.draw(st.integers(4, 40)),
        max_running=data.draw(st.integers(1, 6)),
        prefix_cache=data.draw(st.booleans()),
        min_awaited_tokens=data.draw(st.sampled_from([8, 128])),
    )
    seed = data.draw(st.integers(0, 2**32))
    slots = data.draw(st.sampled_from([0, 20]))
    yard = Yard(limits, 2, seed, num_blocks=data.draw(st.integers(20, 40)), spill_slots=slots)
    losing = data.draw(st.sampled_from([0.0, 0.1]))
    asked = prompts(12, seed)
    next_index, next_epoch = 2, 1
    for handle, prompt in enumerate(asked):
        yard.submit(handle, prompt, max_new_tokens=data.draw(st.integers(0, 30)), stop_token_ids=[3, 4])
        for _ in range(data.draw(st.integers(0, 10))):
            yard.turn()
        if data.draw(st.integers(0, 4)) == 0:
            yard.cancel(data.draw(st.integers(0, handle)))
        event = data.draw(st.integers(0, 5))
        if event < 2 and yard.workers:
            yard.leave(data.draw(st.sampled_from(sorted(yard.workers))))
        if event == 2 or len(yard.workers) < 2:
            yard.start_worker(next_index, 0)
            yard.workers[next_index].losing = losing
            next_index += 1
        if event == 3 and next_epoch < 3 and yard.workers:
            yard.start_worker(data.draw(st.sampled_from(sorted(yard.workers))), next_epoch)
            next_epoch += 1
    yard.start_worker(next_index, 0)
    yard.drain()
    for handle, prompt in enumerate(asked):
        wanted = naive_generate(prompt, handle, [3, 4], min(len(prompt) + yard.max_new[handle], 80))
        if handle in yard.finished:
            assert yard.tokens[handle] == wanted
        else:
            assert yard.tokens[handle] == wanted[: len(yard.tokens[handle])], "it was cancelled"
    for worker in yard.scheduler.workers.values():
        assert worker.pool.used == worker.rows.running == len(worker.arrivals.open) == 0
        assert not worker.leaving, "a worker that leaves and has nothing was not dismissed"


def test_a_sequence_goes_on_elsewhere_and_computes_nothing_anew() -> None:
    yard = running()
    left = computed_on(yard, 1)
    yard.leave(0)
    story = finished(yard)
    assert left == [1]
    assert list(yard.workers) == [1], "it was dismissed"
    assert "worker 0 is asked to end, where it has the K and V of" in story
    assert "are sent by worker 0" in story
    assert "tokens came from worker 0 in" in story
    counters = yard.scheduler.status().counters
    assert counters["handed_over"] == 1
    assert counters["shipped_tokens"] >= 49
    assert counters["recovered"] == counters["preemptions"] == 0
