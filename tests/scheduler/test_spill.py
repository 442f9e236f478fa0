"""Blocks beside the KV cache: every sequence reads its own tokens, wherever they were meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interfaces import KvMoved, SamplingParams, Submit, TextContext
from scheduler.copy_time import HALF_LIFE
from scheduler.spill import LOAD_SECONDS, Spill
from tests.scheduler.clock import Clock
from tests.scheduler.simulated_worker import naive_generate
from tests.scheduler.test_core import LIMITS, REPLICA, Yard, prompts

NONE = np.empty(0, np.int32)
FIRST = list(range(40))
OTHER = list(range(100, 160))


def moved(blocks: dict[int, int], seconds: float = 0.001, **lost: list[int]) -> KvMoved:
    """The report of loads: by ticket, how many blocks are there."""
    return KvMoved(
        1,
        0,
        0,
        np.array(list(blocks), np.int32),
        np.array(list(blocks.values()), np.int32),
        np.full(len(blocks), seconds, np.float32),
        np.array(lost.get("skipped", []), np.int32),
        np.array(lost.get("broken", []), np.int32),
        bool(lost.get("full")),
    )


def digests(count: int, first: int = 0) -> list[bytes]:
    return [i.to_bytes(4, "big") for i in range(first, first + count)]


def kept(count: int, slots: int = 8, clock: Clock | None = None) -> Spill:
    spill = Spill(slots, clock or Clock())
    for block, digest in enumerate(digests(count)):
        spill.save(block, digest, None)
    return spill


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_random_walks_with_a_tier_beside_the_cache(data: st.DataObject) -> None:
    """Blocks are in memory, on the disk or nowhere; moves fail, workers die, requests are cancelled."""
    workers = data.draw(st.integers(1, 2))
    limits = replace(
        LIMITS,
        steps_in_flight=data.draw(st.integers(1, 2)),
        most_guesses=data.draw(st.integers(0, 4)),
        max_batch_tokens=data.draw(st.integers(4, 40)),
        max_running=data.draw(st.integers(1, 6)),
        min_awaited_tokens=data.draw(st.sampled_from([8, 128])),
    )
    seed = data.draw(st.integers(0, 2**32))
    slots = data.draw(st.integers(1, 40))
    yard = Yard(limits, workers, seed, num_blocks=data.draw(st.integers(20, 30)), spill_slots=slots)
    failing = data.draw(st.sampled_from([0.0, 0.2]))
    room = data.draw(st.sampled_from([slots, slots // 2]))
    asked = prompts(6, seed)
    asked = [data.draw(st.sampled_from(asked)) for _ in range(14)]
    epoch = 0
    for handle, prompt in enumerate(asked):
        for worker in yard.workers.values():
            worker.moves.failing = failing
            worker.moves.room = room
        yard.submit(handle, prompt, max_new_tokens=data.draw(st.integers(0, 20)), stop_token_ids=[3, 4])
        for _ in range(data.draw(st.integers(0, 12))):
            yard.turn()
        if data.draw(st.integers(0, 4)) == 0:
            yard.cancel(data.draw(st.integers(0, handle)))
        if epoch < 2 and data.draw(st.integers(0, 9)) == 0:
            epoch += 1
            yard.start_worker(data.draw(st.integers(0, workers - 1)), epoch)
    yard.drain()
    for handle, prompt in enumerate(asked):
        wanted = naive_generate(prompt, handle, [3, 4], min(len(prompt) + yard.max_new[handle], 80))
        if handle in yard.finished:
            assert yard.tokens[handle] == wanted
        else:
            assert yard.tokens[handle] == wanted[: len(yard.tokens[handle])], "it was cancelled"
    for scheduled in yard.scheduler.workers.values():
        assert scheduled.pool.used == 0
        assert scheduled.rows.running == 0
        assert not scheduled.spill.loads()
        assert scheduled.spill.used <= scheduled.spill.slots <= slots


def returning(yard: Yard, between: list[int] = OTHER) -> list[str]:
    """A conversation, another one that takes its blocks, and the first one again. Returns the story of the last."""
    yard.submit(0, FIRST, 4, [])
    yard.drain()
    yard.submit(1, between, 4, [])
    yard.drain()
    params = SamplingParams(seed=2, max_new_tokens=4)
    yard.scheduler.submit(
        REPLICA, Submit(2, TextContext.from_prompt([*FIRST, *yard.tokens[0], 7], params, request_id="back"))
    )
    yard.drain()
    assert yard.tokens[2] == naive_generate([*FIRST, *yard.tokens[0], 7], 2, [], len(FIRST) + 9)
    return list(yard.scheduler.request_log.of("back"))


def test_a_conversation_that_returns_is_loaded_and_not_computed() -> None:
    yard = Yard(num_blocks=20, spill_slots=40)
    story = " | ".join(returning(yard))
    worker = yard.scheduler.workers[0]
    assert worker.spill.loaded >= 10 - 20 // 4
    assert yard.cached[2] == 40, "all full blocks of what was computed"
    assert "more are loaded from the test's disk" in story
    assert "tokens were loaded in 1.0 ms" in story
    status = yard.scheduler.status().workers[0]
    assert status.loaded_tokens == worker.spill.loaded * 4 > 0
    assert status.spill_slots == 40
    assert status.spilled_blocks >= status.spill_used > 0


def test_without_slots_it_is_computed_again() -> None:
    yard = Yard(num_blocks=20)
    returning(yard)
    assert yard.cached.get(2, 0) < 40


def test_what_cannot_be_read_is_computed() -> None:
    yard = Yard(num_blocks=20, spill_slots=40)
    yard.submit(0, FIRST, 4, [])
    yard.drain()
    yard.submit(1, OTHER, 4, [])
    yard.drain()
    yard.workers[0].moves.failing = 1.0
    yard.submit(2, [*FIRST, 7], 4, [])
    yard.drain()
    assert yard.tokens[2] == naive_generate([*FIRST, 7], 2, [], 45)
    assert yard.scheduler.workers[0].spill.loaded == 0


def test_other_tenants_find_nothing_there() -> None:
    yard = Yard(num_blocks=20, spill_slots=40)
    yard.submit(0, FIRST, 4, [])
    yard.drain()
    yard.submit(1, OTHER, 4, [])
    yard.drain()
    params = SamplingParams(seed=2, max_new_tokens=4)
    yard.scheduler.submit(REPLICA, Submit(2, TextContext.from_prompt([*FIRST, 7], params, cache_salt="tenant")))
    yard.drain()
    assert yard.cached.get(2, 0) == 0
    assert yard.scheduler.workers[0].spill.loaded == 0


def test_a_flushed_cache_is_flushed_there_too() -> None:
    yard = Yard(num_blocks=20, spill_slots=40)
    yard.submit(0, FIRST, 4, [])
    yard.drain()
    yard.submit(1, OTHER, 4, [])
    yard.drain()
    assert yard.scheduler.workers[0].spill.used
    assert yard.scheduler.flush_cache() == ""
    assert not yard.scheduler.workers[0].spill.used
    yard.submit(2, [*FIRST, 7], 4, [])
    yard.drain()
    assert yard.cached.get(2, 0) == 0


def test_a_load_that_hangs_is_not_waited_for() -> None:
    yard = Yard(num_blocks=20, spill_slots=40)
    yard.submit(0, FIRST, 4, [])
    yard.drain()
    yard.submit(1, OTHER, 4, [])
    yard.drain()
    moves = yard.workers[0].moves
    yard.submit(2, [*FIRST, 7], 4, [])
    [(_, step)] = yard.scheduler.next_steps()
    assert step.load is not None
    assert not len(step.rows)
    yard.scheduler.step_result(yard.workers[0].run(step))
    assert yard.scheduler.next_steps() == [], "its row waits"
    yard.clock.advance(LOAD_SECONDS + 1)
    hanging, moves.pending = moves.pending, []
    yard.drain()
    assert yard.tokens[2] == naive_generate([*FIRST, 7], 2, [], 45)
    late = [yard.scheduler.workers[0].spill.late]
    moves.pending = hanging
    yard.drain()
    late.append(yard.scheduler.workers[0].spill.late)
    assert late == [True, False], "its answer has come after all"
    assert yard.scheduler.workers[0].pool.used == 0


def test_what_loads_slower_than_it_is_computed_is_computed_and_measured_again_one_day() -> None:
    clock = Clock()
    spill = kept(6, clock=clock)
    assert spill.match(digests(6), computing=0.01) == digests(6), "nothing is measured"
    slots = spill.hold(digests(6))
    spill.load(0, 1, 0, list(range(6)), slots, 0.01)
    [(load, blocks, _)] = spill.answered(moved({1: 6}, seconds=0.6))
    assert (load.computing, blocks) == (0.06, 6)
    assert spill.expected_seconds(2) == pytest.approx(0.2)
    assert spill.match(digests(6), computing=0.2) == digests(6)
    assert spill.match(digests(6), computing=0.01) == []
    for _ in range(10_000):
        assert spill.match(digests(6), computing=0.01) == [], "how often it is asked makes no difference"
    clock.advance(3 * HALF_LIFE)
    assert spill.match(digests(6), computing=0.01) == [], "it takes ten times as long as computing"
    clock.advance(HALF_LIFE)
    assert spill.match(digests(6), computing=0.01) == digests(6)


def test_blocks_are_saved_while_others_are_loaded_if_loads_pay() -> None:
    spill = kept(6)
    spill.load(0, 1, 0, list(range(6)), spill.hold(digests(6)), 0.01)
    spill.answered(moved({1: 6}, seconds=0.012))
    spill.load(0, 1, 0, list(range(6)), spill.hold(digests(6)), 0.01)
    assert spill.expected_seconds(1) == pytest.approx(0.014), "it would be loaded behind the others"
    spill.save(9, b"new", 0.01)
    assert spill.saved == 7
    spill.save(10, b"newer", 0.001)
    assert spill.saved == 7, "it is computed in less time than it is loaded"


def test_one_block_is_not_worth_a_load() -> None:
    assert kept(4).match([*digests(1), b"else"], None) == []


def test_slots_are_reused_least_recently_used_first_but_not_under_a_load() -> None:
    spill = kept(4, slots=4)
    assert spill.hold(digests(2)) == [0, 1]
    spill.save(9, b"new", None)
    spill.save(9, b"newer", None)
    spill.save(9, b"newest", None)
    assert spill.used == 4, "two are held; the third took the first one's place"
    assert spill.match(digests(2), None) == digests(2)
    assert spill.match(digests(2, first=2), None) == []
    save, _ = spill.take_orders()
    assert save is not None
    assert save[-3:, 1].tolist() in ([2, 3, 2], [3, 2, 3])


def test_a_full_disk_ends_the_growth_and_broken_slots_are_left() -> None:
    spill = kept(4, slots=8)
    spill.answered(moved({}, broken=[3], full=[1]))
    assert (spill.slots, spill.used) == (4, 3)
    for block, digest in enumerate(digests(6, first=10)):
        spill.save(block, digest, None)
    assert spill.used == 3, "slots that were written are reused"
    save, _ = spill.take_orders()
    assert save is not None
    assert 3 not in save[4:, 1]


def test_a_slot_that_was_skipped_twice_is_free_once() -> None:
    spill = kept(2, slots=2)
    spill.answered(moved({}, skipped=[0]))
    spill.answered(moved({}, skipped=[0]))
    spill.save(5, b"a", None)
    spill.save(6, b"b", None)
    save, _ = spill.take_orders()
    assert save is not None
    assert sorted(save[2:, 1].tolist()) == [0, 1]


@pytest.mark.parametrize(
    "report", [moved({7: 1}), moved({1: 9}), KvMoved(1, 0, 0, NONE, NONE, np.ones(1, np.float32), NONE, NONE)]
)
def test_a_report_that_fits_no_order_changes_nothing(report: KvMoved) -> None:
    spill = kept(4)
    spill.load(0, 1, 0, [0, 1, 2, 3], spill.hold(digests(4)), None)
    with pytest.raises(ValueError, match=r"ticket|fit together"):
        spill.answered(report)
    assert len(spill.loads()) == 1


def test_random_seeds_agree_between_a_cache_with_and_without_a_tier() -> None:
    seed = random.randrange(2**32)
    asked = prompts(10, seed)
    answers = []
    for slots in (0, 60):
        yard = Yard(seed=seed, num_blocks=24, spill_slots=slots)
        for handle, prompt in enumerate([*asked, *asked]):
            yard.submit(handle, prompt, 12, [])
            yard.turn()
        yard.drain()
        answers.append(dict(yard.tokens))
    assert answers[0] == answers[1], f"seed {seed}"
