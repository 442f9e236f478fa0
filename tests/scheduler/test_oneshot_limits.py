"""What one-shot requests may hold: requests that end leave nothing, limits count all that wait, and batches fit a
message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.limits import CPU_TEXT_TOKENS, GPU_TEXT_TOKENS
from scheduler.oneshot_batches import MAX_VALUES
from shared.setting_forms import STEP_TOKENS
from tests.scheduler.simulated_worker import SimulatedWorker
from tests.scheduler.test_core import LIMITS as YARD_LIMITS
from tests.scheduler.test_core import Yard
from tests.scheduler.text_yard import LIMITS, REPLICA, TextYard, hello, tokens_in


def test_the_status_has_what_each_worker_takes_at_once() -> None:
    """Of workers that generate what they have sized their memory for, within the operator's limits."""
    yard = Yard(replace(YARD_LIMITS, max_batch_tokens=None, max_running=None), workers=0)
    for index, (rows, tokens, device) in enumerate(((5, 700, "cuda:0"), (3, 0, "cpu"))):
        one = SimulatedWorker(index, 0, **{**yard.shape, "max_rows": rows}).hello
        assert yard.scheduler.worker_hello(replace(one, step_tokens=tokens, device=device))
    status = yard.scheduler.status()
    found = [(worker.max_rows, worker.step_tokens, worker.text_tokens) for worker in status.workers]
    assert found == [(5, 700, 0), (3, STEP_TOKENS, 0)]
    assert status.max_running == 8
    yard.scheduler.limits = replace(yard.scheduler.limits, max_batch_tokens=600)
    assert [worker.step_tokens for worker in yard.scheduler.status().workers] == [600, STEP_TOKENS]
    (worker,) = TextYard().scheduler.status().workers
    assert (worker.max_rows, worker.text_tokens) == (0, CPU_TEXT_TOKENS)


@pytest.mark.parametrize("workers", [0, 1])
def test_requests_that_end_while_nothing_is_computed_leave_nothing(workers: int) -> None:
    yard = TextYard(workers=workers)
    yard.scheduler.paused = True
    kept = [yard.submit([[1]]) for _ in range(3)]
    for _ in range(200):
        yard.scheduler.cancel(REPLICA, [yard.submit([[1, 2]])])
        yard.send()
    lane = yard.scheduler.oneshot
    assert len(lane._unchecked) == (0 if workers else len(kept))
    assert len(lane.queue) == len(kept)
    held = [len(level.heap) for tenant in lane.queue._tenants.values() for level in tenant.levels.values()]
    assert sum(held) <= 2 * len(kept) + 16
    yard.scheduler.paused = False
    if not workers:
        yard.start_worker(0)
    yard.drain()
    for handle in kept:
        yard.asked[handle].check()


def test_requests_that_have_begun_count_with_the_rest_of_their_texts() -> None:
    yard = TextYard(replace(LIMITS, max_queued=2, max_queued_tokens=5500))
    yard.token_seconds = 1e-3
    first = yard.bulk(60, 100)
    assert not yard.asked[first].error, "a request beyond the limit is taken when nothing else waits"
    yard.send()
    assert yard.scheduler.oneshot.waiting == 0
    assert "requests of 5800 tokens wait already" in yard.asked[yard.bulk(1, 100)].error
    for _ in range(2):
        yard.answer()
        yard.send()
    second = yard.bulk(1, 100)
    assert not yard.asked[second].error
    assert "2 requests wait already" in yard.asked[yard.submit([[1]])].error
    yard.drain()
    for handle in (first, second):
        yard.asked[handle].check()


def test_the_last_texts_of_a_long_request_do_not_starve_after_a_crash() -> None:
    yard = TextYard()
    yard.token_seconds = 1e-3
    bulk = yard.bulk(200, 100)
    yard.send()
    while len(yard.scheduler.oneshot.queue):
        yard.answer()
        yard.send()
    yard.kill_worker(0, blamed=False)
    yard.start_worker(0)
    for _ in range(20):
        while len(yard.scheduler.oneshot.queue) < 4:
            yard.bulk(1, 400)
        yard.turn()
    yard.asked[bulk].check()


def test_the_values_of_a_batch_fit_a_message() -> None:
    yard = TextYard(workers=0)
    yard.epochs[0] = 1
    assert yard.scheduler.worker_hello(replace(hello(0, 1), hidden_size=MAX_VALUES // 256))
    yard.bulk(100, 32)
    (batch,) = yard.send()
    assert tokens_in(batch) == 256


@pytest.mark.parametrize(
    ("device", "tokens"),
    [("cpu", CPU_TEXT_TOKENS), ("cpu+cpu", CPU_TEXT_TOKENS), ("cuda:0", GPU_TEXT_TOKENS), ("cuda:1", GPU_TEXT_TOKENS)],
)
def test_batches_are_as_large_as_the_device_wants(device: str, tokens: int) -> None:
    assert replace(LIMITS, max_text_tokens=None).text_batch_tokens(device) == tokens
    assert replace(LIMITS, max_text_tokens=7).text_batch_tokens(device) == 7
