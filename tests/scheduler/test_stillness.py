"""No request waits for ever: it is computed, or it fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from interfaces import Finish
from scheduler.stillness import LOOK_SECONDS, STUCK_SECONDS
from tests.scheduler.simulated_worker import naive_generate
from tests.scheduler.test_core import LIMITS, Yard


def look(yard: Yard, seconds: float) -> None:
    """Let the time pass, and look as often as the loop does."""
    end = yard.clock.now + seconds
    while yard.clock.now < end:
        yard.clock.advance(LOOK_SECONDS)
        yard.scheduler.look_for_stuck()
    yard._read_results()


def test_without_a_worker_a_request_waits_long_but_not_for_ever() -> None:
    yard = Yard(workers=0)
    yard.submit(0, [1, 2], 5, [])
    look(yard, STUCK_SECONDS)
    assert not yard.finished, "a worker may take long to come back"
    look(yard, 3 * LOOK_SECONDS)
    assert yard.finished == {0: Finish.FAILED}
    assert "no model worker is here" in yard.errors[0]


def test_a_request_that_no_worker_computes_fails_and_its_worker_is_named() -> None:
    yard = Yard()
    yard.submit(0, [1, 2], 5, [])
    yard.scheduler.next_steps()
    look(yard, STUCK_SECONDS + 3 * LOOK_SECONDS)
    assert yard.finished == {0: Finish.FAILED}
    assert "worker 0 (test, epoch 0) in step" in yard.errors[0]
    assert yard.scheduler.workers[0].pool.used == 0


def test_a_long_line_and_a_long_prompt_are_no_standstill() -> None:
    """One request runs all the time, one is before its turn, and one is a prompt in pieces."""
    yard = Yard(max_rows=2, num_blocks=200)
    for handle, prompt in enumerate(([1], list(range(60)), [3])):
        yard.submit(handle, prompt, 10, [])
    while yard.turn():
        look(yard, STUCK_SECONDS / 2)
    for handle, prompt in enumerate(([1], list(range(60)), [3])):
        assert yard.tokens[handle] == naive_generate(prompt, handle, [], len(prompt) + 10)


@pytest.mark.parametrize("how", ["pause", "jump"])
def test_what_is_paused_is_not_stuck(how: str) -> None:
    yard = Yard()
    yard.submit(0, [1, 2], 5, [])
    yard.turn()
    look(yard, STUCK_SECONDS / 2)
    if how == "pause":
        yard.scheduler.paused = True
        look(yard, 5 * STUCK_SECONDS)
        yard.scheduler.paused = False
    else:
        yard.clock.advance(5 * STUCK_SECONDS)
        yard.scheduler.stuck_detector.grant_grace()
    look(yard, LOOK_SECONDS)
    yard.drain()
    assert yard.tokens[0] == naive_generate([1, 2], 0, [], 7)


@pytest.mark.parametrize("running", [True, False])
def test_a_request_that_is_nowhere_is_found(running: bool, caplog: pytest.LogCaptureFixture) -> None:
    """An error in the middle of moving it leaves such a request."""
    yard = Yard()
    yard.submit(0, [1, 2, 3], 6, [])
    if running:
        yard.turn()
    [sequence] = yard.scheduler.replicas.all_sequences()
    if running:
        yard.scheduler.lose_worker(0, "was taken away", blamed=False)
        yard.start_worker(0, epoch=1)
    yard.scheduler.waiting.discard(sequence)
    if running:
        sequence.row = 3
    yard.drain()
    assert not yard.finished
    look(yard, LOOK_SECONDS)
    assert "neither in line nor on a worker" in caplog.text
    yard.drain()
    assert yard.tokens[0] == naive_generate([1, 2, 3], 0, [], 9)


def test_a_row_whose_beginning_is_computed_for_another_one_is_not_stuck() -> None:
    yard = Yard(replace(LIMITS, max_batch_tokens=4, min_awaited_tokens=8), num_blocks=60)
    prompt = list(range(60))
    yard.submit(0, prompt, 5, [])
    yard.submit(1, [*prompt, 300], 5, [])
    while yard.turn():
        look(yard, STUCK_SECONDS / 3)
    assert yard.finished == {0: Finish.LENGTH, 1: Finish.LENGTH}
