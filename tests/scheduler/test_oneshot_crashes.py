"""The one-shot lane: texts that crash workers, and workers that have rows, too."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from interfaces import Batch, SamplingParams, Step, Submit, TextContext
from scheduler.quarantine import CRASHES_BEFORE_ISOLATION
from tests.scheduler.simulated_worker import SimulatedWorker
from tests.scheduler.text_yard import REPLICA, TextYard, requests_in, run


def test_a_text_that_crashes_workers_fails_alone() -> None:
    yard = TextYard()
    innocent = [yard.bulk(40, 10) for _ in range(3)]
    poisonous = yard.submit([[1, 2, 3]] * 30 + [[666]] + [[4, 5]] * 30)
    crashes: Counter[bool] = Counter()
    for _ in range(10_000):
        yard.send()
        if not yard.in_flight[0]:
            break
        batch = yard.in_flight[0][0]
        if any(666 in part.tokens for part in batch.parts):
            crashes[sum(map(len, batch.parts)) == 1] += 1
            yard.kill_worker(0)
            yard.start_worker(0)
            yard.read()
        else:
            yard.answer()
    assert crashes == {False: CRASHES_BEFORE_ISOLATION, True: 1}
    assert "crashed 3 times while it computed text 30 of this request" in yard.asked[poisonous].error
    for handle in innocent:
        yard.asked[handle].check()


def test_a_suspected_text_is_computed_alone_and_survives_when_it_is_innocent() -> None:
    yard = TextYard()
    handle = yard.submit([[i] for i in range(5)])
    for _ in range(CRASHES_BEFORE_ISOLATION):
        yard.send()
        yard.kill_worker(0)
        yard.start_worker(0)
    other = yard.submit([[9]])
    alone = 0
    while yard.turn():
        assert len(yard.in_flight[0]) <= 1
        alone += requests_in(yard.sent[-1]) == ["r0"] and sum(map(len, yard.sent[-1].parts)) == 1
    assert alone == 5
    yard.asked[handle].check()
    yard.asked[other].check()


def test_a_worker_that_leaves_in_order_makes_nothing_suspicious() -> None:
    yard = TextYard()
    handle = yard.submit([[i] for i in range(5)])
    for _ in range(5):
        yard.send()
        yard.kill_worker(0, blamed=False)
        yard.start_worker(0)
    (batch,) = yard.send()
    assert len(batch.parts[0]) == 5
    yard.answer()
    yard.asked[handle].check()


def mixed() -> tuple[TextYard, SimulatedWorker]:
    """A worker with rows that also computes texts."""
    yard = TextYard(workers=0)
    worker = SimulatedWorker(0, 0, num_blocks=40, block_size=4, max_rows=8, max_model_len=80)
    worker.hello = replace(worker.hello, tasks=["embed", "generate"], hidden_size=4, vocab_size=1000)
    assert yard.scheduler.worker_hello(worker.hello)
    return yard, worker


def in_turns(yard: TextYard, worker: SimulatedWorker, turns: int) -> str:
    """Send batches (B) and steps (S) and answer them in their order. Returns the order."""
    scheduler = yard.scheduler
    order = ""
    queue: list[Batch | Step] = []
    for _ in range(turns):
        for _, batch in scheduler.next_batches():
            assert isinstance(batch, Batch)
            queue.append(batch)
            order += "B"
        for _, step in scheduler.next_steps():
            queue.append(step)
            order += "S"
        if not queue:
            break
        head = queue.pop(0)
        yard.clock.advance(0.01)
        if isinstance(head, Batch):
            scheduler.batch_result(run(head, 0))
        else:
            scheduler.step_result(worker.run(head))
        scheduler.take_vectors()
        scheduler.take_results()
    return order


def test_batches_and_steps_take_turns_on_a_worker_that_has_both() -> None:
    yard, worker = mixed()
    scheduler = yard.scheduler
    scheduler.submit(REPLICA, Submit(900, TextContext.from_prompt([1, 2], SamplingParams(max_new_tokens=60))))
    yard.bulk(2000, 30)
    order = in_turns(yard, worker, 60)
    assert "BB" not in order.removeprefix("B")
    assert order.count("B") > 10
    assert order.count("S") > 10


def test_a_suspected_text_has_no_step_beside_it() -> None:
    yard, worker = mixed()
    scheduler = yard.scheduler
    yard.submit([[1]])
    for epoch in range(1, CRASHES_BEFORE_ISOLATION + 1):
        assert scheduler.next_batches()
        scheduler.lose_worker(0, "died")
        worker = SimulatedWorker(0, epoch, num_blocks=40, block_size=4, max_rows=8, max_model_len=80)
        worker.hello = replace(worker.hello, tasks=["embed", "generate"], hidden_size=4, vocab_size=1000)
        assert scheduler.worker_hello(worker.hello)
    scheduler.submit(REPLICA, Submit(900, TextContext.from_prompt([1, 2], SamplingParams(max_new_tokens=60))))
    ((_, step),) = scheduler.next_steps()
    assert scheduler.next_batches() == []
    assert scheduler.next_steps() == []
    scheduler.step_result(worker.run(step))
    ((_, batch),) = scheduler.next_batches()
    assert scheduler.next_steps() == []
    assert isinstance(batch, Batch)
    scheduler.batch_result(run(batch, 0))
    assert scheduler.next_steps()


def test_texts_that_must_be_alone_and_rows_do_not_wait_for_each_other() -> None:
    yard, worker = mixed()
    scheduler = yard.scheduler
    yard.submit([[i] for i in range(5)])
    for epoch in range(1, CRASHES_BEFORE_ISOLATION + 1):
        assert scheduler.next_batches()
        yard.kill_worker(0)
        worker = SimulatedWorker(0, epoch, num_blocks=40, block_size=4, max_rows=8, max_model_len=80)
        worker.hello = replace(worker.hello, tasks=["embed", "generate"], hidden_size=4, vocab_size=1000)
        assert scheduler.worker_hello(worker.hello)
    scheduler.submit(REPLICA, Submit(900, TextContext.from_prompt([1, 2], SamplingParams(max_new_tokens=30))))
    order = in_turns(yard, worker, 200)
    assert (order.count("B"), order.count("S") >= 30) == (5, True)
    assert scheduler.oneshot.running == scheduler.oneshot.waiting == 0
