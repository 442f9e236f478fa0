"""The one-shot lane: every text is answered exactly once, and by turns that are fair."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interfaces import (
    LOWEST_PRIORITY,
    Batch,
    ErrorCode,
    Finish,
    PoolingContext,
    PoolingTask,
    RequestID,
    SamplingParams,
    SchedulingOptions,
    Submit,
    TextContext,
)
from scheduler.batches_in_flight import BATCH_SECONDS, MIN_BATCH_TOKENS
from scheduler.stillness import STUCK_SECONDS
from tests.scheduler.text_yard import LIMITS, REPLICA, TextYard, hello, requests_in, run, tokens_in

texts = st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=20), min_size=1, max_size=30)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_text_is_answered_once_whatever_dies(data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, 3))
    limits = replace(LIMITS, max_text_tokens=data.draw(st.integers(1, 60)))
    yard = TextYard(limits, workers, seed=data.draw(st.integers(0, 2**16)))
    cancelled: set[int] = set()
    for _ in range(data.draw(st.integers(1, 60))):
        kind = data.draw(st.sampled_from(["submit", "turn", "turn", "turn", "send", "kill", "leave", "cancel"]))
        index = data.draw(st.integers(0, workers - 1))
        if kind == "submit":
            scheduling = SchedulingOptions(data.draw(st.sampled_from("ab")), priority=data.draw(st.integers(0, 1)))
            yard.submit(data.draw(texts), scheduling)
        elif kind == "turn":
            yard.turn()
        elif kind == "send":
            yard.send()
        elif kind in ("kill", "leave"):
            yard.kill_worker(index, blamed=kind == "kill")
            yard.start_worker(index)
        elif yard.asked:
            handle = data.draw(st.sampled_from(sorted(yard.asked)))
            if not yard.asked[handle].complete:
                cancelled.add(handle)
                yard.scheduler.cancel(REPLICA, [handle])
    yard.drain()
    for handle, asked in yard.asked.items():
        if asked.finished == Finish.FAILED:
            assert "crashed 3 times" in asked.error
        elif handle not in cancelled:
            asked.check()
    lane = yard.scheduler.oneshot
    assert (lane.waiting, lane.running, lane._waiting_tokens, len(lane.queue)) == (0, 0, 0, 0)
    assert yard.scheduler.requests.open_of("a") == yard.scheduler.requests.open_of("b") == 0
    for batch in yard.sent:
        assert tokens_in(batch) <= limits.text_batch_tokens("cpu") or sum(map(len, batch.parts)) == 1


def test_values_of_different_requests_come_from_one_batch() -> None:
    yard = TextYard()
    yard.submit([[1, 2], [3]])
    yard.submit([[4]])
    yard.submit([[5, 6, 7]])
    (batch,) = yard.send()
    assert requests_in(batch) == ["r1", "r0", "r2"]  # the shortest first
    yard.answer()
    for asked in yard.asked.values():
        asked.check()


def test_a_query_is_in_the_next_batch_however_long_the_bulk_is() -> None:
    yard = TextYard()
    bulk = yard.bulk(2048, 128)
    for _ in range(5):
        yard.send()
        yard.answer()
    yard.send()
    before = len(yard.in_flight[0])
    query = yard.submit([[7] * 16])
    for _ in range(before):
        assert not yard.asked[query].complete
        yard.answer()
        yard.send()
    assert requests_in(yard.in_flight[0][0])[0] == f"r{query}"
    yard.answer()
    yard.asked[query].check()
    assert not yard.asked[bulk].complete
    yard.drain()
    yard.asked[bulk].check()


def test_a_query_waits_for_none_of_the_bulk_in_its_own_batch() -> None:
    yard = TextYard()
    yard.bulk(500, 100)
    yard.send()
    yard.submit([[7] * 16])
    yard.answer()
    (batch,) = yard.send()[:1]
    assert requests_in(batch) == ["r1"]


def test_a_bulk_job_goes_on_while_short_ones_keep_coming() -> None:
    yard = TextYard()
    bulk = yard.bulk(40, 128)
    for _ in range(300):
        while yard.scheduler.oneshot.waiting < 4:
            yard.bulk(1, 128)
        yard.send()
        yard.answer()
    yard.asked[bulk].check()


def test_tenants_share_by_weight() -> None:
    yard = TextYard(replace(LIMITS, max_text_tokens=64))
    for tenant, weight in (("light", 1), ("heavy", 3)):
        for _ in range(3):
            yard.bulk(400, 32, SchedulingOptions(tenant, weight))
    for _ in range(200):
        yard.turn()
    done = [sum(len(yard.asked[i].values) for i in group) for group in (range(3), range(3, 6))]
    assert done[1] == pytest.approx(3 * done[0], rel=0.1)


def test_requests_of_one_tenant_take_turns() -> None:
    yard = TextYard()
    for _ in range(4):
        yard.bulk(300, 100)
    for _ in range(20):
        yard.turn()
    done = [len(asked.values) for asked in yard.asked.values()]
    assert min(done) > 0.5 * max(done) > 0


def test_a_higher_priority_goes_first() -> None:
    yard = TextYard()
    yard.bulk(100, 100)
    urgent = yard.bulk(100, 100, SchedulingOptions(priority=5))
    yard.send()
    assert all(requests_in(batch) == [f"r{urgent}"] for batch in yard.sent)


def test_texts_of_the_lowest_priority_join_no_others() -> None:
    yard = TextYard()
    low = yard.bulk(20, 4, SchedulingOptions(priority=LOWEST_PRIORITY))
    users = [yard.bulk(1, 4), yard.bulk(1, 4)]
    while len(yard.asked[low].values) < 20:
        yard.turn()
    assert [sorted({*requests_in(batch)}) for batch in yard.sent] == [[f"r{user}" for user in users], [f"r{low}"]]


def test_slow_devices_get_small_batches_and_fast_ones_large_ones() -> None:
    for token_seconds in (1e-3, 1e-6):
        yard = TextYard()
        yard.token_seconds = token_seconds
        yard.bulk(3000, 32)
        for _ in range(10):
            yard.turn()
        sizes = [tokens_in(batch) for batch in yard.sent]
        assert sizes[0] == MIN_BATCH_TOKENS
        expected = max(MIN_BATCH_TOKENS, min(4096, BATCH_SECONDS / token_seconds))
        assert sizes[-1] == pytest.approx(expected, rel=0.1)


def test_two_batches_are_in_flight_when_they_are_short_and_one_when_it_is_long() -> None:
    for token_seconds, expected in ((1e-6, 2), (1e-3, 1)):
        yard = TextYard()
        yard.token_seconds = token_seconds
        yard.bulk(3000, 32)
        yard.turn()
        yard.send()
        assert len(yard.in_flight[0]) == expected


def test_a_cancelled_request_is_free_at_once() -> None:
    yard = TextYard()
    bulk = yard.bulk(2048, 100)
    yard.send()
    yard.scheduler.cancel(REPLICA, [bulk])
    assert yard.scheduler.status().running == yard.scheduler.status().waiting == 0
    assert yard.scheduler.requests.open_of("") == 0
    yard.answer()
    assert not yard.asked[bulk].values
    assert yard.send() == []
    other = yard.submit([[1]])
    yard.drain()
    yard.asked[other].check()


def test_time_limits_of_the_queue_and_in_all() -> None:
    yard = TextYard()
    yard.bulk(2048, 100)
    yard.send()
    queued = yard.submit([[1]], SchedulingOptions(queue_seconds=2))
    total = yard.bulk(2048, 100, SchedulingOptions(total_seconds=3))
    begun = yard.submit([[1]], SchedulingOptions(queue_seconds=9))
    yard.clock.advance(1)
    yard.scheduler.expire()
    yard.read()
    assert not yard.asked[queued].finished
    yard.clock.advance(1)
    yard.scheduler.expire()
    yard.read()
    assert "could not be started within its time limit of 2 s" in yard.asked[queued].error
    yard.drain()
    yard.asked[begun].check()
    late = yard.bulk(2048, 100, SchedulingOptions(total_seconds=0.5))
    yard.turn()
    yard.clock.advance(1)
    yard.scheduler.expire()
    yard.read()
    assert "has not ended within its time limit of 0.5 s" in yard.asked[late].error
    yard.asked[total].check()


def test_queues_have_limits_and_the_reason_says_which() -> None:
    limits = replace(LIMITS, max_queued=2, max_queued_tokens=100, max_open_per_tenant=3)
    yard = TextYard(limits, workers=0)
    yard.submit([[1] * 90])
    assert "requests of 90 tokens wait already" in yard.asked[yard.submit([[1] * 20])].error
    yard.submit([[1]])
    assert "2 requests wait already" in yard.asked[yard.submit([[1]])].error
    assert not yard.asked[yard.submit([[1]], again=True)].error  # it waited before
    yard.start_worker(0)
    yard.drain()
    for _ in range(3):
        yard.submit([[1]], SchedulingOptions("key"))
        yard.send()
    assert "3 requests of this key are open" in yard.asked[yard.submit([[1]], SchedulingOptions("key"))].error


def test_a_part_that_fails_takes_only_its_request_with_it() -> None:
    yard = TextYard()
    first = yard.submit([[1]])
    second = yard.submit([[2]])
    (batch,) = yard.send()
    result = run(yard.in_flight[0].popleft(), 0)
    place = requests_in(batch).index(f"r{first}")
    result.parts[place] = None
    yard.scheduler.batch_result(replace(result, errors={place: "no"}))
    yard.read()
    assert (yard.asked[first].finished, yard.asked[first].error) == (Finish.FAILED, "no")
    yard.asked[second].check()


def test_a_result_without_all_of_its_parts_fails_the_missing_ones() -> None:
    yard = TextYard()
    handles = [yard.submit([[1]]), yard.submit([[2]])]
    yard.send()
    result = run(yard.in_flight[0].popleft(), 0)
    yard.scheduler.batch_result(replace(result, parts=result.parts[:1]))
    yard.read()
    assert sorted(yard.asked[handle].complete for handle in handles) == [False, True]
    assert any("did not answer all" in yard.asked[handle].error for handle in handles)


def test_results_of_no_batch_are_refused_and_those_of_other_epochs_ignored() -> None:
    yard = TextYard()
    handle = yard.submit([[1]])
    yard.send()
    good = run(yard.in_flight[0][0], 0)
    for ignored in (replace(good, incarnation=9), replace(good, epoch=9), replace(good, index=9)):
        yard.scheduler.batch_result(ignored)
    with pytest.raises(ValueError, match="answers no batch in flight"):
        yard.scheduler.batch_result(replace(good, number=2))
    yard.read()
    assert not yard.asked[handle].values
    yard.answer()
    yard.asked[handle].check()


def test_requests_that_wait_for_the_first_worker_are_compared_with_it() -> None:
    yard = TextYard(workers=0)
    good = yard.submit([[1]])
    bad = yard.submit([[5000]])
    long = yard.submit([[1] * 600])
    assert yard.send() == []
    yard.start_worker(0)
    yard.drain()
    yard.asked[good].check()
    assert "token ids must be between 0 and 999" in yard.asked[bad].error
    assert "text 0 has 600 tokens; a text may have 512" in yard.asked[long].error


def test_what_no_worker_can_do_is_refused_and_tasks_find_their_worker() -> None:
    yard = TextYard(workers=0)
    yard.start_worker(0, ("classify",))
    yard.start_worker(1, ("embed",))
    assert yard.scheduler.status().tasks == ["classify", "embed"]
    for task, index in ((PoolingTask.EMBED, 1), (PoolingTask.CLASSIFY, 0)):
        context = PoolingContext.of([[1]], task, request_id=RequestID(task))
        yard.scheduler.submit(REPLICA, Submit(90 + index, context))
        ((found, batch),) = yard.scheduler.next_batches()
        assert isinstance(batch, Batch)
        assert (found, requests_in(batch)) == (index, [task])
    for submit in (
        Submit(50, PoolingContext.of([[1]], PoolingTask.SPARSE)),
        Submit(50, PoolingContext.of([[1]], PoolingTask.EMBED, dimensions=5)),
        Submit(50, TextContext.from_prompt([1], SamplingParams(max_new_tokens=1))),
    ):
        yard.scheduler.submit(REPLICA, submit)
        ((_, results),) = yard.scheduler.take_results()
        error = results.errors[50]
        assert error.code == ErrorCode.INVALID
        assert "they can classify, embed" in error.message or "dimensions must be at most 4" in error.message


def test_pauses_aborts_and_replicas_that_go() -> None:
    yard = TextYard()
    handle = yard.bulk(2048, 100)
    yard.scheduler.paused = True
    assert yard.send() == []
    yard.scheduler.paused = False
    assert yard.send()
    assert yard.scheduler.abort(["r0"]) == 1
    yard.read()
    assert yard.asked[handle].finished == Finish.CANCELLED
    other = yard.bulk(2048, 100)
    assert yard.scheduler.reconcile(REPLICA, [other, 77]) == [77]
    assert yard.scheduler.oneshot.handles(REPLICA) == [other]
    assert yard.scheduler.reconcile(REPLICA, []) == []
    assert yard.scheduler.oneshot.handles(REPLICA) == []
    yard.bulk(2048, 100)
    assert yard.scheduler.drop_replica(REPLICA) == 1
    assert yard.scheduler.oneshot.running == yard.scheduler.oneshot.waiting == 0


def test_a_handle_that_is_used_again_replaces_its_request() -> None:
    yard = TextYard()
    yard.bulk(100, 10)
    context = PoolingContext.of([[3]], PoolingTask.EMBED, request_id="new")
    yard.scheduler.submit(REPLICA, Submit(0, context))
    assert yard.scheduler.oneshot.handles(REPLICA) == [0]
    (batch,) = yard.send()
    assert requests_in(batch) == ["new"]


def test_requests_for_which_nothing_is_computed_fail_in_the_end() -> None:
    yard = TextYard()
    handle = yard.submit([[1]])
    yard.kill_worker(0)
    yard.clock.advance(STUCK_SECONDS - 1)
    yard.scheduler.look_for_stuck()
    yard.read()
    assert not yard.asked[handle].finished
    yard.clock.advance(2)
    yard.scheduler.look_for_stuck()
    yard.read()
    assert "no model worker is here" in yard.asked[handle].error


def test_a_late_batch_makes_its_worker_late() -> None:
    yard = TextYard()
    for _ in range(3):
        yard.submit([[1]])
        yard.drain()
    worker = yard.scheduler.workers[0]
    assert worker.lateness() is None
    yard.submit([[1]])
    yard.send()
    yard.clock.advance(LIMITS.stall_seconds + 1)
    assert worker.lateness() is not None
    worker.grant_grace()
    assert worker.lateness() is None


def test_the_log_tells_the_way_of_a_request() -> None:
    yard = TextYard()
    yard.bulk(30, 30)
    yard.send()
    yard.kill_worker(0)
    yard.start_worker(0)
    yard.drain()
    lines = "\n".join(yard.scheduler.request_log.of("r0"))
    parts = ("queued with 30 texts of 900 tokens to embed", "in batch 1 of worker 0", "computed again", "finished: 30")
    for part in parts:
        assert part in lines
    counters = yard.scheduler.counters
    assert (counters["texts"], counters["text_tokens"]) == (30, 900)
    assert counters["batches"] >= 2
    assert (counters["batch_texts<="], counters["batch_tokens<="]) == (30, 900)
    for name in ("batch_texts", "batch_tokens"):
        sizes = {key: count for key, count in counters.items() if key.startswith(f"{name}<=") and not key.endswith("=")}
        assert sum(sizes.values()) == counters["batches"]


def test_a_worker_that_only_generates_gets_no_texts() -> None:
    yard = TextYard(workers=0)
    assert yard.scheduler.worker_hello(hello(0, 1, ("generate",)))
    handle = yard.submit([[1]])
    assert "no model worker here can embed: they can generate" in yard.asked[handle].error
