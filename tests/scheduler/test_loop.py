"""What the loop does in one turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from interfaces import Step
from scheduler import loop as loop_module
from scheduler.loop import Loop
from shared.endpoints import RunDirectory
from tests.scheduler.test_core import Yard


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
