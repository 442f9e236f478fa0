"""Peers that are silent or late: given up in time, and not before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from interfaces import WEIGHTS, WeightsAction, WeightsOrder
from scheduler.adapter import Adapter
from scheduler.health import (
    REPLICA_SILENCE_SECONDS,
    SECONDS_BETWEEN_WARNINGS,
    STATUS_SECONDS,
    WORKER_SILENCE_SECONDS,
    Health,
)
from scheduler.process_watch import ProcessWatch
from scheduler.step_deadline import FIRST_STEP_SECONDS
from scheduler.worker_adapters import LOAD_SECONDS
from tests.scheduler.simulated_worker import naive_generate
from tests.scheduler.test_core import REPLICA, Yard


class Checked:
    """A yard whose health is checked as often as the loop does it."""

    def __init__(self, workers: int = 1) -> None:
        self.yard = Yard(workers=workers)
        watch = ProcessWatch(zmq.Poller(), lambda index: Path(f"{index}.stack"), self.yard.clock)
        self.health = Health(self.yard.scheduler, watch, self.yard.clock)

    def wait(self, seconds: float, heard: Callable[[], None] = lambda: None) -> int:
        """Lets the time pass; `heard` says before each check which peers have spoken. Returns the number of checks."""
        checks = 0
        for _ in range(round(seconds / 0.1)):
            self.yard.clock.advance(0.1)
            heard()
            if self.health.due():
                self.health.check()
                checks += 1
        return checks


def test_checks_come_twice_a_second_and_sooner_when_the_status_has_changed() -> None:
    checked = Checked()
    assert checked.health.due()
    checked.health.check()
    assert not checked.health.due()
    assert checked.health.seconds_left() == pytest.approx(STATUS_SECONDS, abs=0.01)
    checked.health.check_soon()
    assert checked.health.due()
    assert checked.health.seconds_left() == 0.0
    assert 9 / STATUS_SECONDS < checked.wait(10) < 11 / STATUS_SECONDS


def test_a_silent_replica_is_given_up_and_one_that_speaks_is_not() -> None:
    checked = Checked()
    yard = checked.yard
    yard.submit(0, [1, 2], 5, [])
    checked.health.replica_heard(REPLICA)
    checked.wait(20, lambda: checked.health.replica_heard(REPLICA))
    assert REPLICA in yard.scheduler.replicas
    checked.wait(REPLICA_SILENCE_SECONDS - 1)
    assert REPLICA in yard.scheduler.replicas
    checked.wait(2)
    assert REPLICA not in yard.scheduler.replicas
    assert len(yard.scheduler.waiting) == 0


def test_a_silent_idle_worker_is_given_up() -> None:
    checked = Checked(workers=2)
    scheduler = checked.yard.scheduler
    checked.health.worker_heard(0)
    checked.wait(WORKER_SILENCE_SECONDS - 1, lambda: checked.health.worker_heard(1))
    assert len(scheduler.workers) == 2
    checked.wait(2, lambda: checked.health.worker_heard(1))
    assert list(scheduler.workers) == [1]
    assert scheduler.is_fenced(checked.yard.workers[0].hello)


def test_a_worker_whose_step_is_late_is_given_up_at_the_second_look() -> None:
    checked = Checked()
    yard = checked.yard
    yard.submit(0, [1, 2], 5, [])
    yard.scheduler.next_steps()

    def spoken() -> None:
        checked.health.replica_heard(REPLICA)
        checked.health.worker_heard(0)

    checked.wait(FIRST_STEP_SECONDS - 1, spoken)
    assert 0 in yard.scheduler.workers
    yard.clock.advance(2)
    spoken()
    checked.health.check()
    assert 0 in yard.scheduler.workers, "this process may itself have been stopped for a moment"
    yard.clock.advance(STATUS_SECONDS)
    spoken()
    checked.health.check()
    assert 0 not in yard.scheduler.workers
    [event] = [line for line in yard.scheduler.request_log.events if "stalled" in line]
    assert "worker 0 (test, epoch 0) in step 1" in event
    yard.start_worker(0, epoch=1)
    yard.drain()
    assert yard.tokens[0] == naive_generate([1, 2], 0, [], 7)


@pytest.mark.parametrize("released", [False, True])
def test_an_adapter_is_not_late_while_the_weights_are_away(released: bool) -> None:
    checked = Checked()
    scheduler = checked.yard.scheduler
    scheduler.workers[0].adapters.load(Adapter(1, "a", "/a"))
    if released:
        scheduler.weights.obey(REPLICA, WeightsOrder(1, WeightsAction.RELEASE, tags=[WEIGHTS]))
    checked.wait(LOAD_SECONDS + 10, lambda: checked.health.worker_heard(0))
    assert (0 in scheduler.workers) == released


def test_requests_without_a_worker_are_warned_of_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    checked = Checked(workers=0)
    checked.yard.submit(0, [1], 5, [])
    checked.wait(SECONDS_BETWEEN_WARNINGS - 1)
    assert "have waited" not in caplog.text
    checked.wait(3 * SECONDS_BETWEEN_WARNINGS)
    assert 2 <= caplog.text.count("1 requests have waited for a model worker") <= 3


def test_the_time_of_a_step_does_not_count_the_pause_before_it() -> None:
    yard = Yard()
    yard.clock.advance(3600)
    yard.submit(0, [1, 2], 5, [])
    assert yard.scheduler.next_steps()
    yard.clock.advance(1)
    (status,) = yard.scheduler.status().workers
    assert status.seconds_since_step == pytest.approx(1, abs=0.01)
