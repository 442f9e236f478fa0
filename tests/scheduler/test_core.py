"""The scheduler driven directly, with simulated workers that check every block they read."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interfaces import (
    Dismissal,
    Finish,
    RequestID,
    SamplingParams,
    ShipKv,
    Step,
    StepResult,
    Submit,
    TakeKv,
    TextContext,
    WorkerLeaves,
    decode,
    encode,
)
from scheduler.core import Scheduler
from scheduler.limits import Limits
from tests.scheduler.clock import Clock
from tests.scheduler.simulated_worker import VOCAB, SimulatedWorker, naive_generate

REPLICA = b"replica"
LIMITS = Limits(
    max_running=64, max_batch_tokens=16, max_queued=1000, max_model_len=None, steps_in_flight=2, prefix_cache=True
)


class Yard:
    """A scheduler and its workers, with messages in flight that arrive in any order across workers."""

    def __init__(self, limits: Limits = LIMITS, workers: int = 1, seed: int = 0, **shape: int) -> None:
        self.clock = Clock()
        self.scheduler = Scheduler(limits, 1, self.clock)
        self.shape = {"num_blocks": 40, "block_size": 4, "max_rows": 64, "max_model_len": 80} | shape
        self.random = random.Random(seed)
        self._seconds = random.Random(seed)
        self.workers: dict[int, SimulatedWorker] = {}
        # Messages for workers; most of them are steps.
        self.in_flight: dict[int, deque[Any]] = defaultdict(deque)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self.errors: dict[int, str] = {}
        self.max_new: dict[int, int] = {}
        for index in range(workers):
            self.start_worker(index, epoch=0)

    def start_worker(self, index: int, epoch: int) -> None:
        self.workers[index] = SimulatedWorker(index, epoch, **self.shape)
        self.in_flight[index].clear()
        assert self.scheduler.worker_hello(self.workers[index].hello)

    def submit(self, handle: int, prompt: list[int], max_new_tokens: int, stop_token_ids: list[int]) -> None:
        self.max_new[handle] = max_new_tokens
        params = SamplingParams(seed=handle, max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids)
        self.scheduler.submit(REPLICA, Submit(handle, TextContext.from_prompt(prompt, params)))

    def leave(self, index: int) -> None:
        """A worker is asked to end."""
        self.scheduler.worker_leaves(WorkerLeaves(index, self.workers[index].hello.epoch))

    def cancel(self, handle: int) -> None:
        self.scheduler.cancel(REPLICA, [handle])

    def turn(self) -> bool:
        """One turn of the loop and one answer of a random worker; False when nothing is left to do."""
        for index, step in self.scheduler.next_steps():
            steps = sum(isinstance(message, Step) for message in self.in_flight[index])
            assert steps < self.scheduler.limits.steps_in_flight
            self.in_flight[index].append(step)
        for index, message in self.scheduler.next_shipments():
            self.in_flight[index].append(message)
        busy = [index for index in self.workers if self.in_flight[index]]
        if busy:
            index = self.random.choice(busy)
            self._deliver(index, self.in_flight[index].popleft())
        moving = [worker for worker in self.workers.values() if worker.moves.pending]
        if moving:
            moved = self.random.choice(moving).moves.move(most=self.random.randint(0, 6))
            if moved is not None:
                self.scheduler.kv_moved(decode(encode(moved)))
        self._read_results()
        self.check_blocks()
        return bool(busy or moving)

    def _deliver(self, index: int, message: Step | ShipKv | TakeKv | Dismissal) -> None:
        match message:
            case Step():
                result = self.workers[index].run(message)
                self.clock.advance(self._seconds.uniform(0.01, 0.02))
                self.scheduler.step_result(decode(encode(result)))
            case ShipKv() | TakeKv():
                answer = self.workers[index].ship(message)
                self.clock.advance(0.001)
                self.scheduler.kv_shipped(decode(encode(answer)))
            case Dismissal():
                del self.workers[index]
                self.scheduler.lose_worker(index, "said goodbye", blamed=False)

    def drain(self) -> None:
        for _ in range(100_000):
            if not self.turn():
                return
        raise AssertionError("the scheduler makes no progress")

    def _read_results(self) -> None:
        for identity, results in self.scheduler.take_results():
            assert identity == REPLICA
            columns = (results.handles.tolist(), results.tokens.tolist(), results.finished.tolist())
            for handle, token, finished in zip(*columns, strict=True):
                assert handle not in self.finished, "results after the end"
                if token >= 0:
                    self.tokens[handle].append(token)
                if finished:
                    self.finished[handle] = finished
            self.cached |= results.cached
            self.errors |= {handle: error.message for handle, error in results.errors.items()}

    def check_blocks(self) -> None:
        """No block is owned twice unless it is a shared prefix, and none is lost."""
        for worker in self.scheduler.workers.values():
            owners = [0] * worker.pool.num_blocks
            for sequence in worker.rows.sequences:
                for block in sequence.blocks if sequence else ():
                    owners[block] += 1
            for load in worker.spill.loads():
                for block in load.blocks:
                    owners[block] += 1
            for arrival in worker.arrivals.open:
                for block in arrival.blocks:
                    owners[block] += 1
            for block in self.scheduler.rebalancing.held(worker):
                owners[block] += 1
            assert owners == worker.pool._owners
            assert worker.pool.used == sum(count > 0 for count in owners)
            held = self.scheduler.rebalancing.held(worker)
            if not (self.scheduler.limits.prefix_cache or worker.arrivals.open or held):
                assert max(owners) <= 1
            for sequence in self.scheduler.replicas.all_sequences():
                elsewhere = sequence.elsewhere
                if elsewhere is not None and elsewhere.place == (worker.hello.index, worker.hello.epoch):
                    assert worker.leaving or set(elsewhere.blocks) <= set(held), "others may write there"


def prompts(count: int, seed: int, longest: int = 30) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(longest)]
    made = []
    for _ in range(count):
        prefix = shared[: rng.choice([0, 0, 5, 12, 20])]
        made.append(prefix + [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest - len(prefix)))])
    return made


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_sixteen_sequences_in_few_blocks_give_what_each_gives_alone(
    workers: int, steps_in_flight: int, prefix_cache: bool
) -> None:
    seed = random.randrange(2**32)
    limits = replace(LIMITS, steps_in_flight=steps_in_flight, prefix_cache=prefix_cache)
    yard = Yard(limits, workers, seed, num_blocks=24)  # with 40 for each of two workers one draw in a thousand fitted
    asked = prompts(16, seed)
    for handle, prompt in enumerate(asked):
        yard.submit(handle, prompt, max_new_tokens=40, stop_token_ids=list(range(0, VOCAB, 50)))
    yard.drain()
    for handle, prompt in enumerate(asked):
        limit = min(len(prompt) + 40, 80)
        assert yard.tokens[handle] == naive_generate(prompt, handle, list(range(0, VOCAB, 50)), limit), f"seed {seed}"
        assert yard.finished[handle] in (Finish.STOP, Finish.LENGTH)
    assert yard.scheduler.counters["preemptions"] > 0, "the blocks were meant to run out"
    assert all(worker.pool.used == 0 for worker in yard.scheduler.workers.values())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_walks(data: st.DataObject) -> None:
    """Requests come, are cancelled, workers die and return: every surviving request gets exactly its tokens."""
    workers = data.draw(st.integers(1, 3))
    limits = replace(
        LIMITS,
        steps_in_flight=data.draw(st.integers(1, 2)),
        most_guesses=data.draw(st.integers(0, 8)),
        prefix_cache=data.draw(st.booleans()),
        max_batch_tokens=data.draw(st.integers(1, 40)),
        max_running=data.draw(st.integers(1, 8)),
    )
    seed = data.draw(st.integers(0, 2**32))
    yard = Yard(limits, workers, seed, num_blocks=data.draw(st.integers(20, 50)))
    asked = prompts(12, seed)
    cancelled: set[int] = set()
    epoch, crashed = 0, set[int]()
    for handle, prompt in enumerate(asked):
        yard.submit(handle, prompt, max_new_tokens=data.draw(st.integers(0, 30)), stop_token_ids=[3, 4])
        for _ in range(data.draw(st.integers(0, 4))):
            yard.turn()
        if data.draw(st.integers(0, 3)) == 0:
            victim = data.draw(st.integers(0, handle))
            yard.cancel(victim)
            cancelled.add(victim)
        if len(crashed) < 2 and data.draw(st.integers(0, 9)) == 0:
            epoch += 1
            crashed.add(epoch)
            yard.start_worker(data.draw(st.integers(0, workers - 1)), epoch)
    yard.drain()
    for handle, prompt in enumerate(asked):
        wanted = naive_generate(prompt, handle, [3, 4], min(len(prompt) + yard.max_new[handle], 80))
        if handle in cancelled and handle not in yard.finished:
            assert yard.tokens[handle] == wanted[: len(yard.tokens[handle])]
        else:
            assert yard.tokens[handle] == wanted
    assert all(worker.pool.used == 0 and worker.rows.running == 0 for worker in yard.scheduler.workers.values())
    assert not yard.scheduler.replicas[REPLICA].sequences


@pytest.mark.parametrize("most_guesses", [0, 7])
@pytest.mark.parametrize("limit", [60, 61])
def test_right_guesses_save_steps_and_change_no_token(most_guesses: int, limit: int) -> None:
    yard = Yard(replace(LIMITS, most_guesses=most_guesses), num_blocks=200)
    yard.submit(0, [1, 2, 3], limit, [])
    yard.drain()
    assert yard.tokens[0] == naive_generate([1, 2, 3], 0, [], limit + 3)
    steps = yard.scheduler.workers[0].in_flight.answered
    assert steps < 40 if most_guesses else steps >= 60


def test_blocks_of_an_answer_that_ended_hold_its_tokens() -> None:
    """Also those that steps in flight compute after its end, or that were guessed."""
    for turns in range(1, 60):
        yard = Yard(replace(LIMITS, most_guesses=5), seed=turns, num_blocks=200)
        yard.submit(0, [1, 2, 3], 70, [])
        for _ in range(turns):
            yard.turn()
        yard.cancel(0)
        had = [1, 2, 3, *yard.tokens[0]]
        yard.submit(1, [*had, 5], 5, [])
        yard.drain()
        assert yard.tokens[1] == naive_generate([*had, 5], 1, [], min(len(had) + 6, 80))


def crash_in_a_step(yard: Yard, epoch: int) -> None:
    yard.scheduler.next_steps()
    yard.start_worker(0, epoch)


def test_budget_bounds_prompts_but_never_stops_decode() -> None:
    yard = Yard(replace(LIMITS, max_batch_tokens=8), num_blocks=200)
    for handle in range(4):
        yard.submit(handle, list(range(handle, handle + 30)), 40, [])
    yard.drain()
    assert yard.workers[0].most_tokens == 8


def test_a_repeated_prompt_is_served_from_the_cache_up_to_its_last_block() -> None:
    yard = Yard()
    prompt = list(range(21))
    yard.submit(0, prompt, 3, [])
    yard.drain()
    yard.submit(1, prompt, 3, [])
    yard.drain()
    assert yard.cached == {1: 20}
    yard.submit(2, prompt[:20], 3, [])
    yard.drain()
    assert yard.cached == {1: 20, 2: 16}, "one token must always be computed"


def test_what_a_row_computed_that_failed_is_found_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without memory has not computed a piece of a prompt, though later pieces are on their way."""
    yard = Yard(replace(LIMITS, max_batch_tokens=8), num_blocks=200)
    prompt = list(range(60))
    yard.submit(0, prompt[:13], 3, [])
    yard.drain()
    worker = yard.workers[0]
    run = worker.run

    def fail(step: Step) -> StepResult:
        none = np.empty(0, np.int32)
        return replace(run(step), rows=none, tokens=none, errors=dict.fromkeys(step.rows.tolist(), "no memory"))

    yard.submit(1, prompt, 5, [])
    with monkeypatch.context() as failing:
        failing.setattr(worker, "run", fail)
        yard.turn()
    assert yard.errors == {1: "no memory"}
    yard.drain()
    yard.submit(2, prompt, 5, [])
    yard.drain()
    assert yard.cached == {2: 12}, "what was there before stays"
    assert yard.tokens[2] == naive_generate(prompt, 2, [], 65)


def test_workers_with_blocks_of_their_own_size_share_no_names() -> None:
    seed = random.randrange(2**32)
    yard = Yard(workers=1, seed=seed)
    yard.shape |= {"block_size": 8, "num_blocks": 20}
    yard.start_worker(1, epoch=0)
    asked = prompts(16, seed)
    for turn in range(3):
        for handle, prompt in enumerate(asked):
            yard.submit(100 * turn + handle, prompt, 40, [])
        yard.drain()
        for handle, prompt in enumerate(asked):
            handle += 100 * turn
            assert yard.tokens[handle] == naive_generate(prompt, handle, [], min(len(prompt) + 40, 80)), f"seed {seed}"
    assert yard.scheduler.counters["preemptions"] > 0, "sequences were meant to move from worker to worker"


def test_salted_prompts_share_nothing_with_others() -> None:
    yard = Yard()
    yard.submit(0, list(range(21)), 3, [])
    yard.drain()
    params = SamplingParams(seed=1, max_new_tokens=3)
    salted = TextContext.from_prompt(range(21), params, cache_salt="tenant")
    yard.scheduler.submit(REPLICA, Submit(1, salted))
    yard.drain()
    assert yard.cached == {}


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [([VOCAB], "between 0 and"), ([-1], "between 0 and"), (list(range(80)), "80 tokens")],
)
def test_what_can_never_run_is_refused_with_a_reason(prompt: list[int], reason: str) -> None:
    yard = Yard()
    yard.submit(0, prompt, 5, [])
    yard.drain()
    assert yard.finished == {0: Finish.FAILED}
    assert reason in yard.errors[0]


def test_the_queue_is_bounded() -> None:
    yard = Yard(replace(LIMITS, max_queued=2))
    for handle in range(3):
        yard.submit(handle, [1], 1, [])
    yard.drain()
    assert yard.finished[2] == Finish.FAILED
    assert "retry" in yard.errors[2]
    assert yard.finished[0] == yard.finished[1] == Finish.LENGTH


def test_without_workers_requests_wait_for_one() -> None:
    """A restart of a worker loses no request; one that does not fit the worker is refused when it is there."""
    yard = Yard(workers=0)
    yard.submit(0, [1], 5, [])
    yard.submit(1, [VOCAB], 5, [])
    yard.submit(2, list(range(80)), 5, [])
    yard.drain()
    assert yard.finished == {}
    yard.start_worker(0, epoch=0)
    yard.drain()
    assert yard.tokens[0] == naive_generate([1], 0, [], 6)
    assert yard.finished == {0: Finish.LENGTH, 1: Finish.FAILED, 2: Finish.FAILED}
    assert "between 0 and" in yard.errors[1]
    assert "80 tokens" in yard.errors[2]


def test_a_request_that_crashes_its_worker_every_time_fails_alone() -> None:
    yard = Yard()
    for handle in range(3):
        yard.submit(handle, [handle + 1], 20, [])
    yard.turn()
    for epoch in (1, 2):
        crash_in_a_step(yard, epoch)
        yard.turn()
    assert yard.scheduler.running == 1, "suspects run alone"
    crash_in_a_step(yard, 3)
    yard.drain()
    assert yard.finished[0] == Finish.FAILED
    assert "crashed 3 times" in yard.errors[0]
    for handle in (1, 2):
        assert yard.tokens[handle] == naive_generate([handle + 1], handle, [], 21)


def test_no_request_is_blamed_for_a_crash_between_steps_or_an_orderly_end() -> None:
    yard = Yard()
    yard.submit(0, [1], 40, [])
    for epoch in range(1, 8):
        yard.turn()
        if epoch % 2:
            yard.scheduler.next_steps()
            yard.scheduler.lose_worker(0, "said goodbye", blamed=False)
        yard.start_worker(0, epoch)
    yard.drain()
    assert yard.tokens[0] == naive_generate([1], 0, [], 41)


def test_a_worker_that_was_given_up_is_not_taken_back() -> None:
    yard = Yard()
    yard.submit(0, [1, 2], 10, [])
    [(_, step)] = yard.scheduler.next_steps()
    story = yard.scheduler.lose_worker(0, "stalled")
    assert "worker 0 (test, epoch 0) in step 1 with rows [0] of requests" in story
    assert story.endswith("stalled")
    hello = yard.workers[0].hello
    assert yard.scheduler.is_fenced(hello)
    assert not yard.scheduler.worker_hello(hello)
    yard.scheduler.step_result(yard.workers[0].run(step))
    assert yard.tokens == {}
    yard.start_worker(0, epoch=1)
    yard.drain()
    assert yard.tokens[0] == naive_generate([1, 2], 0, [], 12)


def test_the_log_has_a_requests_whole_story() -> None:
    yard = Yard(replace(LIMITS, max_batch_tokens=8))
    params = SamplingParams(seed=0, max_new_tokens=12)
    for handle, name in enumerate(("first", "second")):
        prompt = range(100 * handle, 100 * handle + 20)
        context = TextContext.from_prompt(prompt, params, request_id=RequestID(name))
        yard.scheduler.submit(REPLICA, Submit(handle, context))
    for _ in range(8):
        yard.turn()
    assert yard.scheduler.retract() == 2
    yard.turn()
    crash_in_a_step(yard, 1)
    yard.drain()
    story = "\n".join(yard.scheduler.request_log.of("second"))
    for event in (
        "queued with 20 tokens",
        "admitted to worker 0 (epoch 0)",
        "first token",
        "steps",
        "computed again from",
        "admitted to worker 0 (epoch 1)",
        "finished with 12 tokens",
        "preempted",
    ):
        assert event in story, story
    assert any("was followed by its next epoch" in line for line in yard.scheduler.request_log.events)


def test_results_of_another_epoch_are_ignored() -> None:
    yard = Yard()
    yard.submit(0, [1, 2, 3], 5, [])
    [(index, step)] = yard.scheduler.next_steps()
    late = yard.workers[index].run(step)
    yard.start_worker(0, epoch=1)
    yard.scheduler.step_result(late)
    yard.drain()
    assert yard.tokens[0] == naive_generate([1, 2, 3], 0, [], 8)


def test_resubmission_goes_on_from_the_emitted_tokens() -> None:
    yard = Yard()
    whole = naive_generate([5, 6, 7], 9, [], 20)
    params = SamplingParams(seed=9, max_new_tokens=17)
    context = TextContext.from_prompt([5, 6, 7], params)
    for token in whole[:6]:
        context.receive_token(token)
    resumed = decode(encode(Submit(0, context)))
    yard.scheduler.submit(REPLICA, resumed)
    yard.drain()
    assert yard.tokens[0] == whole[6:]


def test_a_lost_replica_frees_everything() -> None:
    yard = Yard()
    for handle in range(5):
        yard.submit(handle, list(range(10)), 30, [])
    yard.turn()
    assert yard.scheduler.drop_replica(REPLICA) == 5
    assert yard.scheduler.running == 0
    assert len(yard.scheduler.waiting) == 0


def test_a_step_of_256_rows_is_small_on_the_wire() -> None:
    yard = Yard(replace(LIMITS, max_running=256), num_blocks=2000, max_rows=256)
    for handle in range(256):
        yard.submit(handle, [handle], 30, [])
    sizes = []
    for _ in range(12):
        for index, step in yard.scheduler.next_steps():
            sizes.append(len(encode(step)))
            yard.scheduler.step_result(yard.workers[index].run(step))
    assert min(sizes) < 1400


@pytest.mark.parametrize(("limit", "most"), [(None, (4, 9)), (6, (4, 6)), (20, (4, 9))])
def test_a_worker_gets_steps_of_the_size_that_it_has_said(limit: int | None, most: tuple[int, int]) -> None:
    """Also one of another machine, whose device this one does not know."""
    scheduler = Scheduler(replace(LIMITS, max_running=None, max_batch_tokens=limit), 1)
    for index, tokens in enumerate((4, 9)):
        hello = SimulatedWorker(index, 0, 40, 4, 8 + index, 80).hello
        scheduler.worker_hello(replace(hello, step_tokens=tokens))
    workers = [scheduler.workers[index] for index in range(2)]
    assert tuple(scheduler.limits.step_tokens(worker.hello) for worker in workers) == most
    assert [len(worker.rows.sequences) for worker in workers] == [8, 9]
    assert scheduler.limits.step_tokens(replace(workers[0].hello, step_tokens=0)) == (limit or 512)
