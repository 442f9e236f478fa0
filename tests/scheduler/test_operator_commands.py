"""Commands of operators: flush the cache, abort, pause, retract; and how long requests have waited."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from interfaces import Action, Finish, Hello, Order, OrderAnswer, Status, Submit, TextContext, decode, encode
from interfaces.request.sampling import SamplingParams
from scheduler import draining
from scheduler.core import Scheduler
from scheduler.loop import Loop
from shared.endpoints import RunDirectory
from shared.sockets import connect_dealer
from tests.scheduler.simulated_worker import VOCAB, naive_generate
from tests.scheduler.test_core import LIMITS, REPLICA, Yard, prompts


def submit(yard: Yard, handle: int, request_id: str, identity: bytes = REPLICA) -> None:
    context = TextContext.from_prompt([handle + 1] * 9, SamplingParams(max_new_tokens=30), request_id=request_id)
    yard.scheduler.submit(identity, Submit(handle, context))


def test_flush_drops_cached_prefixes_and_only_of_an_idle_scheduler() -> None:
    yard = Yard(workers=2)
    prompt = [random.randrange(VOCAB) for _ in range(24)]
    yard.submit(1, prompt, 4, [])
    assert "1 wait" in yard.scheduler.flush_cache()
    yard.turn()
    assert "1 requests run" in yard.scheduler.flush_cache()
    yard.drain()
    pools = [worker.pool for worker in yard.scheduler.workers.values()]
    assert sum(pool.cached for pool in pools) >= 6
    assert yard.scheduler.flush_cache() == ""
    assert [pool.cached for pool in pools] == [0, 0]
    assert all(pool.available == pool.num_blocks for pool in pools)
    yard.submit(2, prompt, 4, [])
    yard.drain()
    assert 2 not in yard.cached
    assert yard.tokens[2] == naive_generate(prompt, 2, [], 28)


def test_abort_ends_by_prefix_of_the_id_and_over_replicas() -> None:
    yard = Yard(max_rows=2)
    for handle, name in enumerate(["job_0", "other", "job_1", "job_2"]):
        submit(yard, handle, name)
    submit(yard, 0, "job_3", identity=b"another")
    for _ in range(6):
        yard.turn()
    before = len(yard.tokens[0])
    assert before > 0
    assert yard.scheduler.abort(["job_"]) == 4
    assert yard.scheduler.abort(["job_"]) == yard.scheduler.abort([]) == 0
    sent = dict(yard.scheduler.take_results())
    assert sent[b"another"].finished.tolist() == [Finish.CANCELLED]
    ended = dict(zip(sent[REPLICA].handles.tolist(), sent[REPLICA].finished.tolist(), strict=True))
    assert ended == {0: Finish.CANCELLED, 2: Finish.CANCELLED, 3: Finish.CANCELLED}
    assert not sent[REPLICA].queued, "their placement was published before, or they were never placed"
    yard.drain()
    assert yard.finished == {1: Finish.LENGTH}
    assert len(yard.tokens[0]) == before
    submit(yard, 7, "x")
    assert yard.scheduler.abort([""]) == 1
    assert yard.scheduler.counters["aborted"] == 5
    assert all(worker.pool.used == 0 for worker in yard.scheduler.workers.values())


def test_a_request_aborted_before_its_first_token_says_whether_it_was_placed() -> None:
    yard = Yard(max_rows=1)
    submit(yard, 0, "placed")
    submit(yard, 1, "waits")
    assert yard.scheduler.next_steps()
    yard.scheduler.abort([""])
    ((_, results),) = yard.scheduler.take_results()
    assert results.handles.tolist() == [0, 1]
    assert list(results.queued) == [0]


@pytest.mark.parametrize("retract", [False, True])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_pause_changes_no_token(retract: bool, steps_in_flight: int) -> None:
    seed = random.randrange(2**32)
    yard = Yard(workers=2, seed=seed)
    asked = prompts(8, seed)
    for handle, prompt in enumerate(asked):
        yard.submit(handle, prompt, 30, [])
    for _ in range(random.Random(seed).randrange(1, 12)):
        yard.turn()
    yard.scheduler.paused = True
    if retract:
        assert yard.scheduler.retract() > 0
        assert all(worker.pool.used == 0 for worker in yard.scheduler.workers.values())
    yard.drain()
    assert yard.scheduler.next_steps() == []
    status = yard.scheduler.status()
    assert not status.ready
    assert "continue_generation" in status.reason
    assert (status.running == 0) is retract
    counts = {handle: len(tokens) for handle, tokens in yard.tokens.items()}
    yard.submit(8, [5, 6, 7], 3, [])
    yard.drain()
    assert {handle: len(tokens) for handle, tokens in yard.tokens.items()} == counts
    yard.scheduler.paused = False
    yard.drain()
    assert yard.scheduler.status().ready
    for handle, prompt in enumerate(asked):
        assert yard.tokens[handle] == naive_generate(prompt, handle, [], len(prompt) + 30), f"seed {seed}"
    assert yard.tokens[8] == naive_generate([5, 6, 7], 8, [], 6)


def test_requests_run_again_when_the_one_that_waits_for_a_pause_is_gone() -> None:
    yard = Yard()
    scheduler = yard.scheduler
    drain = scheduler.requests.drain
    yard.submit(0, [1, 2, 3], 40, [])
    for _ in range(3):
        yard.turn()
    drain.begin()
    assert not scheduler.status().ready
    assert "about to be paused" in scheduler.status().reason
    yard.submit(1, [4, 5, 6], 5, [])
    yard.drain()
    assert yard.finished.keys() == {0}, "a new request waits"
    for _ in range(3):
        assert drain.go_on() == ""
        yard.clock.advance(draining.SECONDS_WITHOUT_WORD * 0.9)
        yard.drain()
        assert yard.finished.keys() == {0}
    assert scheduler.weights.changing, "the request that waits is not stuck"
    yard.clock.advance(draining.SECONDS_WITHOUT_WORD)
    assert "no longer wait" in drain.go_on()
    yard.drain()
    assert yard.finished.keys() == {0, 1}
    assert scheduler.status().ready


def test_the_first_token_has_the_wait_and_no_later_one() -> None:
    yard = Yard(max_rows=1)
    submit(yard, 0, "first")
    submit(yard, 1, "second")
    waited: dict[int, int] = {}
    started = yard.clock.now
    for _ in range(200):
        for index, step in yard.scheduler.next_steps():
            yard.in_flight[index].append(step)
        if not yard.in_flight[0]:
            break
        yard.scheduler.step_result(yard.workers[0].run(yard.in_flight[0].popleft()))
        for _, results in yard.scheduler.take_results():
            assert not waited.keys() & results.queued.keys()
            assert results.queued.keys() <= set(results.handles.tolist())
            waited |= results.queued
            if results.queued.keys() == {0}:
                yard.clock.advance(0.05)
    assert 0 <= waited[0] < 50_000 <= waited[1] <= (yard.clock.now - started) * 1e6


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Any]:
    """A socket to a running loop that has no workers."""
    loop = Loop(Scheduler(LIMITS, incarnation=5), RunDirectory(tmp_path))
    thread = threading.Thread(target=loop.run)
    thread.start()
    context: zmq.Context[Any] = zmq.Context()
    socket = connect_dealer(context, RunDirectory(tmp_path).api_endpoint, b"replica-1")
    socket.send(encode(Hello("replica-1")))
    yield socket
    loop.stop()
    thread.join(60)
    assert not thread.is_alive()
    context.destroy(linger=0)


def test_the_loop_answers_orders(replica: Any) -> None:
    def order(number: int, action: int, *ids: str) -> OrderAnswer:
        replica.send(encode(Order(number, action, list(ids))))
        while replica.poll(3000):
            message = decode(replica.recv())
            if isinstance(message, OrderAnswer):
                return message
        raise AssertionError("no answer")

    assert order(1, Action.FLUSH_CACHE) == OrderAnswer(5, 1, "", 0)
    assert order(2, Action.ABORT, "a", "b") == OrderAnswer(5, 2, "", 0)
    assert order(3, Action.PAUSE) == OrderAnswer(5, 3, "", 0)
    assert order(4, Action.RETRACT) == OrderAnswer(5, 4, "", 0)
    assert order(5, Action.CONTINUE) == OrderAnswer(5, 5, "", 0)
    assert "no longer wait" in order(6, Action.DRAIN_ON).refused
    assert order(7, Action.DRAIN) == order(7, Action.DRAIN_ON) == OrderAnswer(5, 7, "", 0)
    assert order(8, Action.CONTINUE) == OrderAnswer(5, 8, "", 0)
    assert "no longer wait" in order(9, Action.DRAIN_ON).refused, "it is not begun again"
    assert order(10, 77).refused == "there is no action 77"
    while not isinstance(status := decode(replica.recv()), Status):
        pass
    assert "aborted" in status.counters
