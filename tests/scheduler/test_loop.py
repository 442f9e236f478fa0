"""What the loop does in one turn."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from interfaces import Step
from scheduler import loop as loop_module
from scheduler.loop import CLOCK_JUMP_SECONDS, Loop
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


@pytest.mark.parametrize("standstill", [True, False])
def test_a_standstill_of_everything_is_nobodys_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, standstill: bool
) -> None:
    """A machine that was suspended for an hour goes on where it was; one replica that is silent so long is gone."""
    monkeypatch.setattr(loop_module, "send_to", lambda *_: True)
    yard = Yard()
    yard.submit(0, [1, 2, 3], 20, [])
    loop = Loop(yard.scheduler, RunDirectory(tmp_path))
    try:
        loop._worker_identity[0] = b"worker"
        loop._last_heard[REPLICA] = loop._worker_heard[0] = time.monotonic()
        loop._send_steps()
        real = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + 3600)
        if not standstill:
            loop._last_look = time.monotonic() - CLOCK_JUMP_SECONDS / 2
        for _ in range(2):
            loop._next_status = 0.0
            loop._keep_time()
        assert (REPLICA in yard.scheduler.replicas) == standstill
        assert (0 in yard.scheduler.workers) == standstill
    finally:
        loop._context.destroy(linger=0)
