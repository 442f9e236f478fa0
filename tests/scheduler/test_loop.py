"""What the loop does in one turn."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interfaces import Action, Order, OrderAnswer, Ready, Step, Welcome, WorkerGoodbye, decode, encode
from scheduler import loop as loop_module
from scheduler.health import CLOCK_JUMP_SECONDS, REPLICA_SILENCE_SECONDS
from scheduler.loop import Loop
from shared.curve import make_peer_keys, make_server_keys
from shared.endpoints import RunDirectory, remote_identity, worker_identity
from shared.sockets import connect_dealer
from tests.scheduler.test_core import REPLICA, Yard
from tests.scheduler.test_remote_workers import hello
from tests.system.server import free_port


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
        loop._worker_identity[0] = b"worker"
        columns = np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32)
        for epoch in (7, 0):
            loop._of_workers.handle(b"worker", Ready(1, epoch, 0, *columns, {}))
            assert heard == ([] if epoch else [0])
        loop._of_workers.handle(b"another", Ready(1, 0, 0, *columns, {}))
        loop._of_workers.handle(b"another", WorkerGoodbye(0, 0))
        assert heard == [0], "a peer speaks for itself alone"
        assert 0 in yard.scheduler.workers
    finally:
        loop._context.destroy(linger=0)


@pytest.mark.parametrize("blamed", [False, True])
def test_requests_survive_links_of_a_group_that_are_cut_and_no_crash_after_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blamed: bool
) -> None:
    monkeypatch.setattr(loop_module, "send_to", lambda *_: True)
    yard = Yard()
    yard.submit(0, [1, 2, 3], 20, [])
    loop = Loop(yard.scheduler, RunDirectory(tmp_path))
    try:
        for epoch in range(5):
            if epoch:
                yard.start_worker(0, epoch)
            loop._worker_identity[0] = b"worker"
            yard.scheduler.next_steps()
            goodbye = decode(encode(WorkerGoodbye(0, epoch, "rank 1 is not heard", blamed)))
            loop._of_workers.handle(b"worker", goodbye)
            assert 0 not in yard.scheduler.workers
        yard.start_worker(0, 5)
        yard.drain()
        assert bool(yard.errors) == blamed
        assert len(yard.tokens[0]) == (0 if blamed else 20)
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
            loop._of_replicas.handle(REPLICA, Order(number, action))
        found = [(answer.refused, answer.requests) for answer in answers if isinstance(answer, OrderAnswer)]
        assert found == [("", 1), ("", 1), ("", 0), ("", 0), ("", 0)]
    finally:
        loop._context.destroy(linger=0)


def test_a_peer_of_another_machine_is_no_local_worker_whatever_its_name_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    make_server_keys(keys)
    make_peer_keys(keys, "box")
    yard = Yard()
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    loop = Loop(yard.scheduler, RunDirectory(tmp_path), endpoint, str(keys))
    try:
        # It would be asked for its process, be sent shared memory, and take over the connection of the one here.
        false = connect_dealer(loop._context, endpoint, worker_identity(0, 0, 1), keys / "box")
        false.send(encode(hello("a", 0, 5)))
        true = connect_dealer(loop._context, endpoint, remote_identity("b"), keys / "box")
        true.send(encode(hello("b")))
        end = time.monotonic() + 60
        while not ("may not have such a name" in caplog.text and true.poll(0)) and time.monotonic() < end:
            loop._receive()
        assert "may not have such a name" in caplog.text
        assert isinstance(decode(true.recv()), Welcome)
        assert not false.poll(0)
        assert set(yard.scheduler.workers) == {0}
        assert yard.scheduler.workers[0].hello.epoch == 0
    finally:
        assert loop._remote is not None
        assert loop._guard is not None
        loop._remote.close(linger=0)
        loop._guard.stop()
        loop._context.destroy(linger=0)
