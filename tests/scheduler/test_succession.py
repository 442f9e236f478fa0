"""Which worker is the one of its index: epochs of one supervisor are ordered, those of two are not."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interfaces import Retire
from interfaces.messages import EPOCHS_OF_A_SUPERVISOR
from scheduler import loop as loop_module
from scheduler.loop import Loop
from scheduler.succession import MAX_SUPERVISORS, FencedEpochs, same_supervisor
from shared.endpoints import RunDirectory
from tests.scheduler.simulated_worker import naive_generate
from tests.scheduler.test_core import Yard

EARLIER, LATER = 7 * EPOCHS_OF_A_SUPERVISOR, 3 * EPOCHS_OF_A_SUPERVISOR
"""First epochs of a supervisor on another machine, and of the one that came after it: the numbers say nothing."""


def test_epochs_that_were_lost_stay_lost() -> None:
    lost = FencedEpochs()
    lost.add(0, EARLIER + 4)
    lost.add(0, EARLIER + 2)
    assert [lost.has(0, EARLIER + epoch) for epoch in (0, 4, 5)] == [True, True, False]
    assert not lost.has(0, LATER)
    assert not lost.has(1, EARLIER)
    assert same_supervisor(EARLIER, EARLIER + 5)
    assert not same_supervisor(EARLIER, LATER)
    for i in range(10, 10 + MAX_SUPERVISORS):
        lost.add(0, i * EPOCHS_OF_A_SUPERVISOR)
    assert not lost.has(0, EARLIER), "what is remembered is bounded"


def test_a_worker_whose_supervisor_was_started_anew_is_taken_whatever_the_number_of_its_epoch() -> None:
    yard = Yard(workers=0)
    yard.start_worker(1, EARLIER)
    yard.submit(0, [1, 2], 8, [])
    yard.turn()
    hello = yard.workers[1].hello
    successor = replace(hello, epoch=LATER)
    assert not yard.scheduler.worker_hello(successor), "while the other one lives it waits"
    assert not yard.scheduler.is_fenced(successor), "and is not sent away"
    yard.scheduler.lose_worker(1, "was silent", blamed=False)
    assert yard.scheduler.is_fenced(hello)
    yard.start_worker(1, LATER)
    yard.drain()
    assert yard.tokens[0] == naive_generate([1, 2], 0, [], 10)


def test_two_workers_under_one_index_do_not_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[Any] = []

    def send_to(socket: Any, identity: bytes, message: Any) -> bool:
        sent.append(message)
        return True

    monkeypatch.setattr(loop_module, "send_to", send_to)
    yard = Yard(workers=0)
    yard.start_worker(1, EARLIER)
    first = yard.workers[1].hello
    loop = Loop(yard.scheduler, RunDirectory(tmp_path))
    try:
        for _ in range(3):
            loop._of_workers.handle(b"worker:1:b", replace(first, epoch=LATER))
        assert yard.scheduler.workers[1].hello.epoch == EARLIER
        assert caplog.text.count("another worker 1 is here already") == 1
        assert 1 not in loop.health._worker_heard, "the one that waits does not speak for the other"
        loop.health.lose_worker(1, EARLIER, "was silent")
        loop._of_workers.handle(b"worker:1:b", replace(first, epoch=LATER, pid=os.getpid()))
        loop._of_workers.handle(b"worker:1:a", first)
        assert yard.scheduler.workers[1].hello.epoch == LATER
        assert [type(message) for message in sent] == [Retire]
    finally:
        loop._context.destroy(linger=0)
