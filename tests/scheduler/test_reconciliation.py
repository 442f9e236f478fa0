"""API process and scheduler over a wire that loses messages: whatever one side forgets, every request gets its tokens.

The real `EngineClient`, the real loop and core of the scheduler and simulated workers; only the sockets are replaced,
by two queues that keep the order, as ZeroMQ does, and lose what the test says.
"""

from __future__ import annotations

import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api_server.engine import client as engine_client
from api_server.engine.client import EngineClient
from api_server.engine.submission import Submission
from interfaces import (
    ErrorCode,
    GenerationStatus,
    SamplingParams,
    SchedulingOptions,
    Submit,
    TextContext,
    Unknown,
    decode,
    encode,
)
from scheduler import loop as loop_module
from scheduler.core import Scheduler
from scheduler.loop import Loop
from shared.endpoints import RunDirectory
from tests.scheduler.simulated_worker import SimulatedWorker, naive_generate
from tests.scheduler.test_core import LIMITS

LENGTH = 12
OTHER = b"another replica"


class Client(EngineClient):
    """The replica's end; what it sends is in `sent`."""

    def __init__(self) -> None:
        super().__init__("ipc:///nowhere", "api_server:0")
        self.sent: deque[bytes] = deque()

    def _send_bytes(self, data: bytes) -> bool:
        self.sent.append(data)
        return True

    def take(self, data: bytes) -> None:
        self._handle(decode(data))


class Wire:
    """One client, one scheduler with a worker, and what is on its way between them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client = Client()
        self.identity = self.client.replica.encode()
        self.answers: deque[bytes] = deque()
        # While set, the client takes nothing: the scheduler finds its queue full.
        self.full = False
        monkeypatch.setattr(loop_module, "send_to", self._send_to)
        self._folder = folder
        self.loop = Loop(Scheduler(LIMITS, incarnation=1), RunDirectory(folder))
        self._start_worker()
        self.client.take(encode(self.loop.scheduler.status()))
        self.submissions: dict[int, Submission] = {}
        self.cancelled: set[int] = set()
        self.read: dict[int, list[int]] = {}

    def _start_worker(self) -> None:
        self.worker = SimulatedWorker(0, 0, num_blocks=200, block_size=4, max_rows=8, max_model_len=80)
        self.loop.scheduler.worker_hello(self.worker.hello)

    def _send_to(self, _: Any, identity: bytes, message: Any) -> bool:
        if identity == self.identity and self.full:
            return False
        if identity == self.identity:
            self.answers.append(encode(message))
        return True

    def submit(self, resumable: bool = False) -> None:
        number = len(self.submissions)
        context = TextContext.from_prompt([number + 1, 2, 3], SamplingParams(seed=number, max_new_tokens=LENGTH))
        scheduling = SchedulingOptions(resume=f"stream {number}" if resumable else "")
        self.submissions[number] = self.client.submit(context, scheduling=scheduling)

    def cancel(self, number: int) -> None:
        if number in self.submissions:
            self.cancelled.add(number)
            self.client.cancel([self.submissions[number]])

    def hello(self) -> None:
        self.client.say_hello()

    def up(self) -> None:
        if self.client.sent:
            self.loop._of_replicas.handle(self.identity, decode(self.client.sent.popleft()))

    def down(self) -> None:
        if self.answers:
            self.client.take(self.answers.popleft())

    def lose_up(self) -> None:
        if self.client.sent:
            self.client.sent.popleft()

    def lose_down(self) -> None:
        if self.answers:
            self.answers.popleft()

    def compute(self) -> None:
        for _, step in self.loop.scheduler.next_steps():
            self.loop.scheduler.step_result(self.worker.run(step))

    def step(self) -> None:
        self.compute()
        self.loop._send_results()

    def drop(self) -> None:
        """The scheduler gives the replica up; another one goes on being there."""
        self.loop.scheduler.replicas.register(OTHER)
        self.loop.health.drop_replica(self.identity, "was silent")

    def refuse_one(self) -> None:
        """The replica's queue is full at the next results."""
        self.full = True
        self.step()
        self.full = False

    def restart(self) -> None:
        """The scheduler dies; what was on its way to it waits, what it had sent is lost from some point on."""
        incarnation = self.loop.scheduler.incarnation + 1
        self.loop._context.destroy(linger=0)
        self.loop = Loop(Scheduler(LIMITS, incarnation), RunDirectory(self._folder))
        self._start_worker()

    def settle(self) -> None:
        """From now on nothing is lost."""
        for _ in range(6):
            self.hello()
            while self.client.sent:
                self.up()
            for _ in range(LENGTH + 10):
                self.step()
            self.answers.append(encode(self.loop.scheduler.status()))
            while self.answers:
                self.down()

    def outcome(self, number: int) -> tuple[list[int], GenerationStatus]:
        context = self.submissions[number].context
        return context.tokens.generated.tolist(), context.status


@contextmanager
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    with tempfile.TemporaryDirectory() as folder:
        made = Wire(Path(folder), monkeypatch)
        try:
            yield made
        finally:
            made.loop._context.destroy(linger=0)
            made.client._context.destroy(linger=0)


def expected(number: int) -> list[int]:
    return naive_generate([number + 1, 2, 3], number, [], 3 + LENGTH)


EVENTS: dict[str, Callable[[Wire], None]] = {
    "submit": lambda wire: wire.submit(),
    "submit resumable": lambda wire: wire.submit(resumable=True),
    "cancel": lambda wire: wire.cancel(len(wire.submissions) // 2),
    "hello": Wire.hello,
    "up": Wire.up,
    "down": Wire.down,
    "step": Wire.step,
    "lose up": Wire.lose_up,
    "lose down": Wire.lose_down,
    "drop": Wire.drop,
    "full": Wire.refuse_one,
    "restart": Wire.restart,
}
ORDINARY = ("submit", "submit resumable", "hello", "up", "down", "step")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(ORDINARY) | st.sampled_from(sorted(EVENTS)), max_size=60))
async def test_whatever_is_lost_every_request_gets_its_tokens_once(story: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_client, "MOST_LOSSES", 10**6)
        with wire(patch) as running:
            for event in story:
                EVENTS[event](running)
                for number in running.submissions:
                    tokens, _ = running.outcome(number)
                    assert tokens == expected(number)[: len(tokens)], "a gap, or a token twice"
            running.settle()
            for number in running.submissions.keys() - running.cancelled:
                assert running.outcome(number) == (expected(number), GenerationStatus.MAXIMUM_LENGTH)
            scheduler = running.loop.scheduler
            assert running.client.running == 0
            assert not scheduler.replicas.all_sequences()
            assert scheduler.running == len(scheduler.waiting) == 0
            assert all(worker.pool.used == 0 for worker in scheduler.workers.values())


async def test_a_replica_that_was_dropped_submits_again_and_goes_on_where_it_was() -> None:
    with pytest.MonkeyPatch.context() as patch, wire(patch) as running:
        running.submit()
        running.up()
        for _ in range(4):
            running.step()
            running.down()
        had, _ = running.outcome(0)
        running.drop()
        for _ in range(4):
            running.step()
        assert not running.answers, "a dropped request has no results"
        running.hello()
        running.up()
        running.down()
        again = [decode(data) for data in running.client.sent]
        [submit] = [message for message in again if isinstance(message, Submit)]
        assert submit.text.tokens.generated.tolist() == had != []
        running.settle()
        assert running.outcome(0) == (expected(0), GenerationStatus.MAXIMUM_LENGTH)


async def test_a_request_before_the_hello_leaves_no_blame_to_those_that_were_dropped() -> None:
    with pytest.MonkeyPatch.context() as patch, wire(patch) as running:
        running.submit()
        running.up()
        running.step()
        running.down()
        running.drop()
        running.submit()
        running.hello()
        running.up()
        running.up()
        [unknown] = [message for message in map(decode, running.answers) if isinstance(message, Unknown)]
        assert unknown.dropped
        assert len(unknown.handles) == 1
        running.settle()
        assert [running.outcome(number)[0] for number in (0, 1)] == [expected(0), expected(1)]


@pytest.mark.parametrize("sent", [True, False])
async def test_an_end_under_way_is_no_loss(sent: bool) -> None:
    """The replica says hello while the end of its request is on the way to it, or about to be sent."""
    with pytest.MonkeyPatch.context() as patch, wire(patch) as running:
        running.submit()
        running.up()
        for _ in range(LENGTH + 3):
            if sent:
                running.step()
            else:
                running.compute()
        running.hello()
        running.up()
        while running.answers:
            running.down()
        assert running.outcome(0) == (expected(0), GenerationStatus.MAXIMUM_LENGTH)
        assert not running.client.sent, "nothing was submitted again"


async def test_a_cancel_that_was_lost_is_seen_at_the_next_hello() -> None:
    with pytest.MonkeyPatch.context() as patch, wire(patch) as running:
        running.submit()
        running.submit()
        running.up()
        running.up()
        running.step()
        running.cancel(0)
        running.lose_up()
        running.hello()
        running.up()
        scheduler = running.loop.scheduler
        assert [sequence.handle for sequence in scheduler.replicas.all_sequences()] == [running.submissions[1].handle]
        assert scheduler.running == 1


async def test_a_request_that_is_lost_again_and_again_fails_with_its_own_error() -> None:
    """As one would whose message the scheduler cannot read."""
    with pytest.MonkeyPatch.context() as patch, wire(patch) as running:
        running.hello()
        running.up()
        running.submit()
        running.submit()
        running.up()
        for _ in range(engine_client.MOST_LOSSES):
            sent, running.client.sent = running.client.sent, deque()
            lost = running.submissions[1].handle
            for data in sent:
                message = decode(data)
                if not (isinstance(message, Submit) and message.handle == lost):
                    running.loop._of_replicas.handle(running.identity, message)
            running.hello()
            running.up()
            while running.answers:
                running.down()
        found = running.submissions[1].inbox.taken()
        assert found is not None
        _, taken = found
        assert taken.error is not None
        assert taken.error.code == ErrorCode.FAILED
        assert f"lost this request {engine_client.MOST_LOSSES} times" in taken.error.message
        running.settle()
        assert running.outcome(0) == (expected(0), GenerationStatus.MAXIMUM_LENGTH)


async def test_a_request_that_stood_in_line_is_not_refused_for_its_length() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "LIMITS", replace(LIMITS, max_queued=2))
        with wire(patch) as running:
            running.worker.hello = replace(running.worker.hello, max_rows=8)
            for _ in range(2):
                running.submit()
                running.up()
            running.step()
            for _ in range(2):
                running.submit()
                running.up()
            running.restart()
            running.settle()
            assert {number: running.outcome(number)[0] for number in range(4)} == {n: expected(n) for n in range(4)}


async def test_a_resumable_stream_is_replayed_from_where_its_replica_stood() -> None:
    """It went on while its replica was thought dead: no token is computed or published twice."""
    with pytest.MonkeyPatch.context() as patch, wire(patch) as running:
        running.submit(resumable=True)
        running.up()
        for _ in range(5):
            running.step()
            running.down()
        running.drop()
        for _ in range(LENGTH):
            running.step()
        running.settle()
        assert running.outcome(0) == (expected(0), GenerationStatus.MAXIMUM_LENGTH)
        assert running.loop.scheduler.counters["finished"] == 1
