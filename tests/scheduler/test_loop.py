"""What the loop does in one turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interfaces import Action, Order, OrderAnswer, Ready, Step
from scheduler import loop as loop_module
from scheduler.health import CLOCK_JUMP_SECONDS, REPLICA_SILENCE_SECONDS
from scheduler.loop import Loop
from shared.endpoints import RunDirectory
from tests.scheduler.test_core import REPLICA, Yard


def test_one_turn_sends_all_steps_that_a_worker_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one a turn, a request alone waits for each result before its next step is sent, until something else comes
    in between."""
    yard, sent = Yard(), []

    def send_to(socket: Any, identity: bytes, step: Step) -> bool:
        sent.append(step.step)
        return True

    monkeypatch.setattr(loop_module, "send_to", send_to)
    yard.submit(0, [1, 2, 3], 20, [])
    loop = Loop(yard.scheduler, RunDirectory(tmp_path))
    try:
        loop._worker_identity[0] = b"worker"
        loop._send_steps()
        assert sent == list(range(1, yard.scheduler.limits.steps_in_flight + 1))
        assert len(sent) > 1
        loop._send_steps()
        assert len(sent) == yard.scheduler.limits.steps_in_flight, "no more than may be in flight"
    finally:
        loop._context.destroy(linger=0)


@pytest.mark.parametrize("jump", [True, False])
def test_a_jump_of_the_clock_is_held_against_no_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: bool
) -> None:
    """A machine that was suspended for an hour goes on where it was; silence of the same length is an end."""
    monkeypatch.setattr(loop_module, "send_to", lambda *_: True)
    yard = Yard()
    yard.submit(0, [1, 2, 3], 20, [])
    loop = Loop(yard.scheduler, RunDirectory(tmp_path))
    try:
        loop._worker_identity[0] = b"worker"
        loop.health.replica_heard(REPLICA)
        loop.health.worker_heard(0)
        loop._send_steps()
        step = 3600.0 if jump else CLOCK_JUMP_SECONDS / 2
        for _ in range(round(3600 / step)):
            yard.clock.advance(step)
            loop._check_health()
        yard.clock.advance(REPLICA_SILENCE_SECONDS / 2)
        loop._check_health()
        assert (REPLICA in yard.scheduler.replicas) == jump
        assert (0 in yard.scheduler.workers) == jump
    finally:
        loop._context.destroy(linger=0)


def test_a_predecessor_that_still_encodes_does_not_speak_for_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard = Yard()
    heard: list[int] = []
    loop = Loop(yard.scheduler, RunDirectory(tmp_path))
    try:
        monkeypatch.setattr(loop.health, "worker_heard", heard.append)
        columns = np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32)
        for epoch in (7, 0):
            loop._from_worker(b"worker", Ready(1, epoch, 0, *columns, {}))
            assert heard == ([] if epoch else [0])
    finally:
        loop._context.destroy(linger=0)


def test_a_wait_for_running_requests_does_not_wait_for_those_that_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pause no request ends."""
    answers: list[OrderAnswer] = []

    def send_to(socket: Any, identity: bytes, answer: OrderAnswer) -> bool:
        answers.append(answer)
        return True

    monkeypatch.setattr(loop_module, "send_to", send_to)
    yard = Yard()
    yard.submit(0, [1, 2, 3], 20, [])
    yard.turn()
    loop = Loop(yard.scheduler, RunDirectory(tmp_path))
    try:
        for number, action in enumerate((Action.DRAIN, Action.DRAIN_ON, Action.PAUSE, Action.DRAIN, Action.DRAIN_ON)):
            loop._run_command(REPLICA, Order(number, action))
        found = [(answer.refused, answer.requests) for answer in answers if isinstance(answer, OrderAnswer)]
        assert found == [("", 1), ("", 1), ("", 0), ("", 0), ("", 0)]
    finally:
        loop._context.destroy(linger=0)
