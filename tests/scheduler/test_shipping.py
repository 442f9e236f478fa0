"""Workers that leave: their sequences go on elsewhere, with the K and V that they have, and lose nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interfaces import KvPiece, KvTaken, SamplingParams, ShipKv, Step, StepResult, Submit, TakeKv, TextContext
from scheduler import shipping
from scheduler.arrivals import MOST_SECONDS
from scheduler.spill import Spill
from tests.scheduler.simulated_worker import naive_generate
from tests.scheduler.test_core import LIMITS, REPLICA, Yard, prompts

PROMPT = list(range(40))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "PIECE_BYTES", 3 * 4 * 8)


def running(workers: int = 2) -> Yard:
    """A yard whose worker 0 has a sequence in the midst of its answer."""
    yard = Yard(LIMITS, workers, max_model_len=200, num_blocks=100)
    begin(yard, 0, PROMPT, "moved")
    return yard


def begin(yard: Yard, handle: int, prompt: list[int], name: str) -> None:
    """Let a sequence get ten tokens on worker 0."""
    params = SamplingParams(seed=handle, max_new_tokens=60)
    yard.scheduler.submit(REPLICA, Submit(handle, TextContext.from_prompt(prompt, params, request_id=name)))
    while len(yard.tokens[handle]) < 10:
        yard.turn()
    assert yard.scheduler.workers[0].rows.running == 1


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


def test_a_worker_alone_ends_at_once_and_its_sequences_wait() -> None:
    yard = running(workers=1)
    yard.leave(0)
    while yard.workers:
        yard.turn()
    assert yard.scheduler.status().waiting == 1
    yard.start_worker(0, 1)
    assert "computed again" in finished(yard)


def test_a_worker_that_has_nothing_ends_at_once() -> None:
    yard = running()
    yard.leave(1)
    yard.turn()
    assert list(yard.scheduler.next_shipments()) == []
    yard.drain()
    assert list(yard.workers) == [0]
    assert finished(yard).count("admitted") == 1, "it has stayed where it was"


def test_nothing_new_goes_to_a_worker_that_leaves() -> None:
    yard = running()
    joined = computed_on(yard, 0)
    yard.leave(0)
    yard.submit(1, [5, 6, 7], 5, [])
    finished(yard)
    assert yard.tokens[1] == naive_generate([5, 6, 7], 1, [], 8)
    assert not joined


def until_it_is_on_its_way(yard: Yard) -> None:
    yard.leave(0)
    while not yard.scheduler.workers[1].arrivals.blocks:
        yard.turn()
    assert yard.scheduler.workers[1].arrivals.open, "it was meant to be under way"


def test_a_source_that_dies_leaves_what_has_come() -> None:
    yard = running()
    left = computed_on(yard, 1)
    until_it_is_on_its_way(yard)
    yard.start_worker(0, 1)
    story = finished(yard)
    assert "have not come, and are computed" in story
    assert 1 < left[0] < 49


def test_a_target_that_dies_is_followed_by_another() -> None:
    yard = running(workers=3)
    until_it_is_on_its_way(yard)
    yard.start_worker(1, 1)
    story = finished(yard)
    assert story.count("are sent by worker 0") == 2
    assert yard.scheduler.status().counters["recovered"] == 1


def test_what_does_not_come_is_computed() -> None:
    yard = running()
    left = computed_on(yard, 1)
    yard.workers[1].losing = 1.0
    yard.leave(0)
    assert "49 have not come, and are computed" in finished(yard)
    assert left == [50]


def test_a_source_that_stands_still_is_not_waited_for() -> None:
    yard = running()
    left = computed_on(yard, 1)
    yard.leave(0)
    while not yard.scheduler.workers[1].arrivals.open:
        yard.turn()
    yard.in_flight[0].clear()
    yard.clock.advance(MOST_SECONDS + 1)
    assert "have not come, and are computed" in finished(yard)
    assert left[0] > 1


def test_a_piece_that_a_target_never_answers_is_given_up() -> None:
    yard = running()
    yard.leave(0)
    while not any(isinstance(message, TakeKv) for message in yard.in_flight[1]):
        yard.turn()
    yard.in_flight[1] = type(yard.in_flight[1])(
        message for message in yard.in_flight[1] if not isinstance(message, TakeKv)
    )
    (waiting,) = yard.scheduler.workers[1].arrivals.open
    yard.clock.advance(2 * MOST_SECONDS + 1)
    while not yard.finished:
        yard.turn()
    assert yard.tokens[0] == naive_generate(PROMPT, 0, [], 100)
    assert "it looks for a place again" in " | ".join(yard.scheduler.request_log.of("moved"))
    assert yard.scheduler.workers[1].arrivals.open == [waiting], "its blocks may still be written to"


def test_blocks_are_saved_before_others_are_written_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has no room for a step yet has not been told what to save."""
    yard = running()
    yard.leave(0)
    monkeypatch.setattr(Spill, "has_orders", property(lambda _: True))
    while not yard.scheduler.workers[1].arrivals.open:
        yard.turn()
    (arrival,) = yard.scheduler.workers[1].arrivals.open
    yard.turn()
    assert not arrival.asked
    monkeypatch.undo()
    finished(yard)
    assert arrival.asked == arrival.there


def test_a_copy_that_is_slower_than_computing_is_cut_off() -> None:
    yard = running()
    target = yard.scheduler.workers[1]
    target.prefill_budget.learn(0, 1000, 0.1)
    left = computed_on(yard, 1)
    until_it_is_on_its_way(yard)
    assert target.arrivals.cost(2) > 2
    finished(yard)
    assert 1 < left[0] < 49
    # It is measured now, and does not pay.
    yard.start_worker(0, 1)
    begin(yard, 1, [9] * 30, "again")
    yard.leave(0)
    yard.drain()
    assert yard.tokens[1] == naive_generate([9] * 30, 1, [], 90)
    assert "are sent by" not in " ".join(yard.scheduler.request_log.of("again"))


PREFIX = [position % 991 for position in range(1000)]


class Shared:
    """Eight requests with one beginning of 1,000 tokens, which then have `own` ones, in the midst of their answers on
    worker 0, after `answered` tokens; worker 1 is new."""

    def __init__(self, own: int = 21, answered: int = 5) -> None:
        self.yard = Yard(replace(LIMITS, max_batch_tokens=64), 1, max_model_len=1200, num_blocks=1000)
        self.prompts = [[*PREFIX, *range(handle, handle + own)] for handle in range(8)]
        for handle, prompt in enumerate(self.prompts):
            params = SamplingParams(seed=handle, max_new_tokens=60)
            context = TextContext.from_prompt(prompt, params, request_id=f"moved-{handle}")
            self.yard.scheduler.submit(REPLICA, Submit(handle, context))
        while len(self.yard.tokens) < 8 or min(map(len, self.yard.tokens.values())) < answered:
            self.yard.turn()
        self.yard.start_worker(1, 0)
        self.left = computed_on(self.yard, 1)
        # The blocks of worker 0 that it is asked for.
        self.asked: list[int] = []
        ship = self.yard.workers[0].ship

        def counted(sent: ShipKv | TakeKv) -> KvPiece | KvTaken:
            if isinstance(sent, ShipKv):
                self.asked.extend(sent.blocks.tolist())
            return ship(sent)

        self.yard.workers[0].ship = counted  # type: ignore[method-assign]
        self.yard.leave(0)

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.yard.turn()

    def story(self, handle: int) -> str:
        return " | ".join(self.yard.scheduler.request_log.of(f"moved-{handle}"))

    def finish(self, handles: Collection[int] = range(8)) -> None:
        self.yard.drain()
        for handle in handles:
            prompt = self.prompts[handle]
            assert self.yard.tokens[handle] == naive_generate(prompt, handle, [], len(prompt) + 60)
        for worker in self.yard.scheduler.workers.values():
            assert worker.pool.used == worker.rows.running == len(worker.arrivals.open) == 0


def test_rows_of_one_prefix_are_sent_it_once_and_their_own_ends() -> None:
    shared = Shared()
    shared.finish()
    blocks = len(PREFIX) // 4
    assert len(shared.asked) == len(set(shared.asked)), "a block was sent twice"
    ends = len(shared.asked) - blocks
    # Each has 21 tokens of its own prompt, and those of its answer by then.
    assert 8 * 6 <= ends <= 8 * (21 + 60) // 4
    assert shared.left == [1] * 8, "nothing was computed again"
    assert "are sent for another request" in shared.story(7)
    assert "more are sent by worker 0" in shared.story(7)
    counters = shared.yard.scheduler.status().counters
    assert counters["shipped_tokens"] <= 4 * len(shared.asked)
    assert counters["handed_over"] == 8


def test_a_row_that_comes_later_is_sent_what_is_not_there() -> None:
    """The prefix has come for another request, which still runs."""
    shared = Shared()
    yard = shared.yard
    shared.until(lambda: bool(yard.scheduler.workers[1].arrivals.open))
    late = [*PREFIX, 500]
    yard.submit(8, late, 5, [])
    shared.finish()
    assert yard.tokens[8] == naive_generate(late, 8, [], len(late) + 5)
    assert len(shared.asked) == len(set(shared.asked))
    assert sum(shared.left) < 8 + 20


def test_when_the_first_of_them_is_cancelled_the_others_are_sent_it() -> None:
    shared = Shared()
    yard = shared.yard
    target = yard.scheduler.workers[1]
    shared.until(lambda: target.arrivals.blocks > 0)
    handle = target.rows.sequence(target.arrivals.open[0].row).handle
    yard.cancel(handle)
    shared.finish([other for other in range(8) if other != handle])
    assert "it looks for a place again" in shared.story((handle + 1) % 8)
    # What had come for the one that has gone is sent once more, and no other.
    assert len(shared.asked) < 2 * len(set(shared.asked))
    assert max(shared.left) == 1


def test_when_the_first_of_equal_prompts_is_cancelled_the_others_are_sent_it() -> None:
    """They have nothing of their own that is worth sending."""
    shared = Shared(own=0, answered=1)
    yard = shared.yard
    target = yard.scheduler.workers[1]
    shared.until(lambda: target.arrivals.blocks > 0)
    [first] = target.arrivals.open
    handle = target.rows.sequence(first.row).handle
    yard.cancel(handle)
    shared.finish([other for other in range(8) if other != handle])
    assert max(shared.left) < 20, "the prompt was computed again"


def test_when_the_source_dies_one_of_them_computes_what_is_missing() -> None:
    shared = Shared()
    yard = shared.yard
    shared.until(lambda: yard.scheduler.workers[1].arrivals.blocks > 0)
    del yard.workers[0]
    yard.in_flight[0].clear()
    yard.scheduler.lose_worker(0, "died")
    shared.finish()
    assert sum(left > 500 for left in shared.left) == 1, "the others waited for it"


def test_when_the_target_dies_they_are_sent_to_another() -> None:
    shared = Shared()
    yard = shared.yard
    yard.start_worker(2, 0)
    left = computed_on(yard, 2)
    shared.until(lambda: yard.scheduler.workers[1].arrivals.blocks > 0)
    del yard.workers[1]
    yard.in_flight[1].clear()
    yard.scheduler.lose_worker(1, "died")
    shared.finish()
    assert left
    assert max(left) == 1


def test_other_forms_and_other_weights_are_computed_again() -> None:
    yard = running()
    yard.scheduler.workers[1].arrivals._form = "another"
    left = computed_on(yard, 1)
    yard.leave(0)
    finished(yard)
    assert left == [50]


@pytest.mark.parametrize("message", [KvPiece(1, 0, 0, 99, np.empty(0, np.uint8)), KvTaken(1, 0, 0, 99, True)])
def test_what_nobody_asked_for_is_refused(message: KvPiece | KvTaken) -> None:
    yard = running()
    with pytest.raises(ValueError, match="ticket 99"):
        yard.scheduler.kv_shipped(message)
    finished(yard)
