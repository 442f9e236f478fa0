"""Index and epoch of workers of other machines, and which of them are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from interfaces import UNREGISTERED, Refusal, Retire, Welcome, WireError, WorkerHello
from scheduler.health import Health
from scheduler.process_watch import ProcessWatch
from scheduler.registration import Registration
from scheduler.remote_workers import KEPT_SECONDS, RemoteWorkers, problem
from scheduler.workers import Worker
from tests.scheduler.clock import Clock
from tests.scheduler.simulated_worker import SimulatedWorker
from tests.scheduler.test_core import Yard


def hello(name: str, index: int = -1, epoch: int = UNREGISTERED, **changed: Any) -> WorkerHello:
    shape = {"num_blocks": 40, "block_size": 4, "max_rows": 8, "max_model_len": 80}
    return replace(SimulatedWorker(0, 0, **shape).hello, name=name, index=index, epoch=epoch, **changed)


def worker(known: WorkerHello) -> Worker:
    return Worker(known, 8, True, 15.0)


class Registered:
    """A registration whose messages are kept, and whose peers can be made unreachable."""

    def __init__(self, workers: int = 1) -> None:
        self.yard = Yard(workers=workers)
        self.sent: list[tuple[bytes, Any]] = []
        self.unreachable: set[bytes] = set()
        scheduler = self.yard.scheduler
        watch = ProcessWatch(zmq.Poller(), lambda index: Path("no-stack"), self.yard.clock)
        self.registration = Registration(
            scheduler, Health(scheduler, watch, self.yard.clock), watch, self.send, first_remote_index=workers
        )

    def send(self, identity: bytes, message: Any) -> bool:
        self.sent.append((identity, message))
        return identity not in self.unreachable

    def join(self, name: str) -> WorkerHello:
        """Register a worker. Returns its hello."""
        identity = f"remote:{name}".encode()
        self.registration.hear(identity, hello(name))
        welcome = self.sent[-1][1]
        assert isinstance(welcome, Welcome)
        registered = hello(name, welcome.index, welcome.epoch)
        self.registration.hear(identity, registered)
        return registered


def test_indices_follow_those_of_local_workers_and_epochs_rise() -> None:
    remote = RemoteWorkers(first_index=2, clock=Clock())
    first, second = remote.welcome(hello("a"), {}), remote.welcome(hello("b"), {})
    assert first is not None
    assert second is not None
    assert (first.index, second.index) == (2, 3)
    assert second.epoch > first.epoch
    assert remote.welcome(hello("a"), {}) == first, "it asks until it has heard the answer"


def test_an_index_that_was_given_in_vain_is_free_again() -> None:
    clock = Clock()
    remote = RemoteWorkers(first_index=0, clock=clock)
    before = remote.welcome(hello("a"), {})
    clock.advance(KEPT_SECONDS + 1)
    after = remote.welcome(hello("b"), {})
    assert before is not None
    assert after is not None
    assert before.index == after.index == 0
    assert after.epoch > before.epoch


def test_a_wanted_index_is_given_or_waited_for() -> None:
    remote = RemoteWorkers(first_index=1, clock=Clock())
    given = remote.welcome(hello("a", index=5), {})
    assert given is not None
    assert given.index == 5
    assert remote.welcome(hello("b", index=5), {}) is None
    here = {5: worker(hello("a", 5, given.epoch))}
    assert remote.welcome(hello("b", index=5), here) is None
    remote.cut_off(5, given.epoch)
    follower = remote.welcome(hello("b", index=5), {})
    assert follower is not None
    assert follower.index == 5


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16' here and 'float32' in worker 0"),
        ({"architecture": "other"}, "architecture is 'other' here and 'simulated' in worker 0"),
        ({"facts": {"config": "b"}}, "config is 'b' here and 'a' in worker 0"),
        ({"facts": {"config": "a", "new": "x"}}, ""),
        ({"num_blocks": 7, "max_model_len": 20}, ""),
    ],
)
def test_what_must_be_equal_is_named_with_both_values(changed: dict[str, Any], named: str) -> None:
    here = {0: worker(hello("a", 0, 0, facts={"config": "a"}))}
    comes = replace(hello("b", facts={"config": "a"}), **changed)
    assert problem(comes, here).startswith(named)
    assert bool(problem(comes, here)) == bool(named)
    assert not problem(comes, {})


def test_a_worker_registers_and_another_model_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    registered = Registered()
    joined = registered.join("a")
    assert registered.yard.scheduler.workers[1].remote
    assert (joined.index, registered.registration.identities[1]) == (1, b"remote:a")
    for _ in range(3):
        registered.registration.hear(b"remote:b", hello("b", dtype="bfloat16"))
    refusals = [message for _, message in registered.sent if isinstance(message, Refusal)]
    assert len(refusals) == 3
    assert "'bfloat16' here and 'float32' in worker 0" in refusals[0].reason
    assert caplog.text.count("refused worker b") == 1


def test_a_worker_that_cannot_be_reached_is_given_up_and_may_come_back_as_it_is() -> None:
    registered = Registered()
    joined = registered.join("a")
    registered.registration.ping()
    assert 1 in registered.yard.scheduler.workers
    registered.unreachable.add(b"remote:a")
    registered.registration.ping()
    assert list(registered.yard.scheduler.workers) == [0], "local workers are not pinged"
    registered.unreachable.clear()
    registered.registration.hear(b"remote:a", joined)
    retire = registered.sent[-1][1]
    assert isinstance(retire, Retire)
    assert retire.stays
    again = registered.join("a")
    assert again.index == joined.index
    assert again.epoch > joined.epoch


def test_a_broken_connection_gives_the_sequences_back_at_once() -> None:
    registered = Registered(workers=0)
    registered.join("a")
    yard = registered.yard
    yard.submit(0, [1, 2, 3], 5, [])
    yard.scheduler.next_steps()
    assert yard.scheduler.running == 1
    registered.registration.hear(b"remote:a", hello("a", index=0))
    assert (yard.scheduler.running, len(yard.scheduler.waiting)) == (0, 1)
    assert registered.join("a").index == 0


def test_a_worker_of_an_earlier_scheduler_asks_anew_and_is_not_here_before() -> None:
    registered = Registered(workers=0)
    registered.registration.hear(b"remote:a", hello("a", 0, epoch=7 * 2**20))
    assert not registered.yard.scheduler.workers, "it would drop what it is sent under that epoch"
    retire = registered.sent[-1][1]
    assert isinstance(retire, Retire)
    assert (retire.epoch, retire.stays) == (7 * 2**20, True)
    registered.registration.hear(b"remote:a", hello("a", 0))
    welcome = registered.sent[-1][1]
    assert isinstance(welcome, Welcome)
    assert welcome.index == 0
    joined = hello("a", 0, welcome.epoch)
    for _ in range(2):
        registered.registration.hear(b"remote:a", joined)
    assert registered.yard.scheduler.workers[0].hello.epoch == welcome.epoch
    assert registered.sent[-1][1] is welcome
    assert registered.join("b").index == 1


@pytest.mark.parametrize("wanted", [0, 1])
def test_the_index_of_a_local_worker_that_restarts_is_not_given(wanted: int) -> None:
    remote = RemoteWorkers(first_index=2, clock=Clock())
    given = remote.welcome(hello("a", index=wanted), {})
    assert given is not None
    assert given.index == 2


def test_a_peer_says_hello_for_itself_alone() -> None:
    """Without a name it would skip all that is asked of a worker, and under another's name it would cut that off."""
    registered = Registered()
    joined = registered.join("a")
    for said in (hello(""), hello("", 0, 5), hello("a"), hello("a", joined.index, joined.epoch)):
        for identity in (b"remote:", b"remote:b"):
            with pytest.raises(WireError, match="is not the worker"):
                registered.registration.hear(identity, said)
    assert registered.yard.scheduler.workers[1].hello.epoch == joined.epoch
    assert registered.registration.identities[1] == b"remote:a"


def test_a_worker_is_compared_with_local_ones_first_and_else_waits_until_the_others_go() -> None:
    registered = Registered(workers=0)
    joined = registered.join("a")
    other = hello("b", dtype="bfloat16")
    registered.registration.hear(b"remote:b", other)
    refusal = registered.sent[-1][1]
    assert isinstance(refusal, Refusal)
    assert refusal.waits
    registered.registration.cut_off(joined.index, "has gone")
    registered.registration.hear(b"remote:b", other)
    assert isinstance(registered.sent[-1][1], Welcome)
    local = worker(hello("", 5, 0))
    remote = worker(hello("a", 0, 0, dtype="bfloat16"))
    remote.remote = True
    assert "in worker 5" in problem(other, {0: remote, 5: local})
    beside = Registered(workers=1)
    beside.registration.hear(b"remote:b", other)
    refusal = beside.sent[-1][1]
    assert isinstance(refusal, Refusal)
    assert not refusal.waits
