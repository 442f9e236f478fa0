"""The worker's loop on another machine than its scheduler: what a broken connection ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from interfaces import UNREGISTERED, Refusal, Step, Welcome, WorkerHello, decode, encode
from model_worker import loop as loop_module
from model_worker.adapter_loads import AdapterLoads
from model_worker.beside import Beside
from model_worker.engine import Engine
from model_worker.execution.base import Counters
from model_worker.loop import Loop
from model_worker.scheduler_link import Refused
from shared.sockets import bind_router


class Device:
    """An engine that notes what it forgets, and calls `on_beat` before each hello."""

    counters = Counters()
    takes = Step

    def __init__(self) -> None:
        self.forgot: list[str] = []
        self.on_beat: Any = lambda: None

    def rest(self) -> None: ...

    def beat(self) -> None:
        self.on_beat()

    def forget(self) -> None:
        self.forgot.append("rows")


class Adapters:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._reader, self._writer = os.pipe()

    def fileno(self) -> int:
        return self._reader

    def forget(self) -> None:
        self._device.forgot.append("adapters")


class Cut:
    """A registered worker of another machine, whose connection can be cut."""

    def __init__(self, path: Path) -> None:
        self.device = Device()
        endpoint = f"ipc://{path}/w.sock"
        self.context: zmq.Context[Any] = zmq.Context()
        self._router = bind_router(self.context, endpoint)
        hello = WorkerHello("cuda:0", -1, 0, os.getpid(), 10, 256, 4, 100, 100, "none", "bfloat16", "cuda")
        adapters = cast(AdapterLoads, Adapters(self.device))
        self.loop = Loop(
            cast(Engine, self.device), hello, endpoint, superseded=self._superseded, beside=Beside(adapters=adapters)
        )
        assert self.loop._link is not None
        self.link = self.loop._link
        self.loop._send(encode(self.loop._hello))
        assert self._router.poll(60_000)
        self._router.recv_multipart()
        self.loop._hello = self.link.registered(self.loop._hello, Welcome(self.link.name, 3, 77))
        self.sent: list[Any] = []
        self.loop._send = lambda data: self.sent.append(decode(data))  # type: ignore[method-assign]
        self._turns = 1

    def _superseded(self) -> bool:
        self._turns -= 1
        return self._turns < 0

    def cut(self) -> None:
        self._router.close(linger=0)
        assert self.link._monitor is not None
        assert self.link._monitor.poll(60_000)


@pytest.fixture
def cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cut]:
    monkeypatch.setattr(loop_module, "same_host", lambda endpoint: False)
    made = Cut(tmp_path)
    yield made
    # A context that is collected with an unsent message waits for ever.
    made.loop._context.destroy(linger=0)
    made.context.destroy(linger=0)


def test_a_connection_that_broke_in_a_step_is_found_before_the_next_hello(cut: Cut) -> None:
    """Another scheduler would take the hello under the old epoch for a worker that runs steps of it."""
    cut.device.on_beat = cut.cut
    cut.loop.run()
    first = cut.sent[0]
    assert isinstance(first, WorkerHello)
    assert (first.index, first.epoch) == (3, UNREGISTERED)


def test_adapters_are_freed_with_the_rows(cut: Cut) -> None:
    cut.cut()
    assert not cut.loop._readable(0)
    assert cut.device.forgot == ["rows", "adapters"]
    assert cut.loop._epoch == UNREGISTERED


def test_a_refusal_ends_a_worker_unless_the_others_may_go(cut: Cut) -> None:
    assert cut.loop._is_for_link(Refusal(cut.link.name, "dtype", waits=True), cut.link)
    with pytest.raises(Refused, match="dtype"):
        cut.loop._is_for_link(Refusal(cut.link.name, "dtype"), cut.link)
