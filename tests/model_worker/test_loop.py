"""The worker's loop gives a step to the device before it waits for the one before it, and answers in order."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import zmq

from interfaces import Step, StepResult, WorkerGoodbye, WorkerHello, decode, encode
from model_worker.engine import Engine
from model_worker.execution.base import Counters
from model_worker.execution.flight import Pending
from model_worker.loop import HELLO_SECONDS, Loop
from shared.sockets import bind_router, receive_from

NOTHING = np.empty(0, np.int32)


class Device:
    """An engine that runs ahead and writes down what is asked of it. Step 4 needs the host."""

    counters = Counters(drafted=5, accepted=3, step_tokens=8)
    takes = Step

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.go = threading.Event()
        self.rested = threading.Semaphore(0)
        self.beats = 0

    def rest(self) -> None:
        self.rested.release()

    def beat(self) -> None:
        self.beats += 1

    def begin(self, step: Step) -> Pending:
        assert self.go.wait(60)
        self.heard.append(f"begin {step.step}")
        result = StepResult(1, 0, 0, step.step, NOTHING, NOTHING, None, {}, 0)

        def read() -> StepResult:
            self.heard.append(f"read {step.step}")
            return result

        return Pending.finished(result) if step.step == 4 else Pending(read)


class Scheduler:
    """The other end of the loop's socket."""

    def __init__(self, path: Path) -> None:
        self.endpoint = f"ipc://{path}/w.sock"
        self._context: zmq.Context[Any] = zmq.Context()
        self._router = bind_router(self._context, self.endpoint)
        self.worker = b""

    def send(self, number: int) -> None:
        step = Step(1, 0, number, NOTHING, None, NOTHING.reshape(0, 3), NOTHING, [])
        self._router.send_multipart([self.worker, encode(step)])

    def next(self, kind: type) -> Any:
        """The next message of that kind."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if self._router.poll(100) and (received := receive_from(self._router)) is not None:
                self.worker = received[0]
                message = decode(received[1][0])
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"the worker sends no {kind.__name__}")

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    made = Scheduler(tmp_path)
    yield made
    made.close()


def started(device: Device, scheduler: Scheduler) -> tuple[Loop, threading.Thread]:
    """A loop that runs and has said hello."""
    hello = WorkerHello("cuda:0", 0, 0, os.getpid(), 10, 256, 4, 100, 100, "none", "bfloat16", "cuda")
    loop = Loop(cast(Engine, device), hello, scheduler.endpoint)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    scheduler.next(WorkerHello)
    return loop, thread


def test_a_step_begins_before_the_last_one_is_read(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_worker.loop.PATIENCE_MS", 60_000)  # the next step comes, however late
    device = Device()
    loop, thread = started(device, scheduler)
    device.go.set()
    for number in (1, 2, 3, 4, 5):
        scheduler.send(number)
    assert [scheduler.next(StepResult).step for _ in range(4)] == [1, 2, 3, 4]
    while device.heard[-1] != "begin 5":
        time.sleep(0.001)
    loop.stop()
    scheduler.send(6)
    scheduler.next(WorkerGoodbye)
    thread.join(60)
    assert device.heard == [
        *("begin 1", "begin 2", "read 1", "begin 3", "read 2", "begin 4", "read 3"),
        *("begin 5", "begin 6", "read 5", "read 6"),
    ]


def test_what_may_be_wanted_later_waits_until_nobody_waits(scheduler: Scheduler) -> None:
    device = Device()
    loop, thread = started(device, scheduler)
    scheduler.send(1)
    assert not device.rested.acquire(timeout=1.5 * HELLO_SECONDS)  # the step is under way
    device.go.set()
    assert device.rested.acquire(timeout=90)
    assert device.heard == ["begin 1", "read 1"]
    assert not device.rested.acquire(timeout=2.5 * HELLO_SECONDS)  # once is enough
    loop.stop()
    scheduler.next(WorkerGoodbye)
    thread.join(60)


def test_who_never_rests_does_it_all_the_same(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_worker.loop.RESTLESS_SECONDS", 1.5)
    monkeypatch.setattr("model_worker.loop.PATIENCE_MS", 60_000)  # or a late scheduler would let it rest
    device = Device()
    device.go.set()
    began = time.monotonic()
    loop, thread = started(device, scheduler)
    rested = False
    number = 10
    scheduler.send(number)
    while not rested and time.monotonic() < began + 60:
        number += 1
        scheduler.send(number)  # two steps are in flight all the time
        scheduler.next(StepResult)
        rested = device.rested.acquire(blocking=False)
    assert rested
    assert time.monotonic() >= began + 1.5  # a step was under way all the time
    loop.stop()
    scheduler.send(number + 1)
    scheduler.next(WorkerGoodbye)
    thread.join(60)


def test_it_makes_room_for_a_better_worker(scheduler: Scheduler) -> None:
    """It answers what it has launched, and says goodbye."""
    device = Device()
    device.go.set()
    superseded = threading.Event()
    hello = WorkerHello("cpu", 0, 0, os.getpid(), 10, 16, 4, 100, 100, "none", "bfloat16", "cpu")
    loop = Loop(cast(Engine, device), hello, scheduler.endpoint, superseded=superseded.is_set)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    hello = scheduler.next(WorkerHello)
    assert (hello.drafted, hello.accepted) == (5, 3)
    assert hello.step_tokens == 8, "fewer than a step has otherwise"
    scheduler.send(1)
    assert scheduler.next(StepResult).step == 1
    superseded.set()
    scheduler.next(WorkerGoodbye)
    thread.join(60)
    assert not thread.is_alive()
    assert [word.split()[1] for word in device.heard if word.startswith("begin")] == [
        word.split()[1] for word in device.heard if word.startswith("read")
    ]
