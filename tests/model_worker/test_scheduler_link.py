"""The link of a worker to a scheduler on another machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from interfaces import UNREGISTERED, Welcome
from model_worker.scheduler_link import SECONDS_BETWEEN_WARNINGS, SILENCE_SECONDS, Refused, SchedulerLink
from tests.scheduler.clock import Clock
from tests.scheduler.simulated_worker import SimulatedWorker

HELLO = SimulatedWorker(-1, 3, num_blocks=4, block_size=4, max_rows=2, max_model_len=16).hello


def test_silence_is_logged_once_a_minute_and_its_end_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    link = SchedulerLink("tcp://server:1", None, clock)
    link.note(heard=True)
    clock.advance(SILENCE_SECONDS - 1)
    link.note(heard=False)
    assert not caplog.text
    clock.advance(2)
    for _ in range(3):
        link.note(heard=False)
    assert caplog.text.count("no scheduler: nothing was heard from tcp://server:1 for 6 s") == 1
    clock.advance(SECONDS_BETWEEN_WARNINGS + 1)
    link.note(heard=False)
    assert caplog.text.count("no scheduler") == 2
    link.note(heard=True)
    assert "heard again after 67 s" in caplog.text
    link.note(heard=False)
    assert caplog.text.count("no scheduler") == 2


def test_an_index_is_asked_for_and_kept_over_restarts(tmp_path: Path) -> None:
    kept = tmp_path / "index"
    link = SchedulerLink("tcp://server:1", kept)
    asking = link.unregistered(HELLO)
    assert (asking.index, asking.epoch, asking.name) == (-1, UNREGISTERED, link.name)
    registered = link.registered(asking, Welcome(link.name, 4, 77))
    assert (registered.index, registered.epoch) == (4, 77)
    assert link.unregistered(registered).index == 4
    successor = SchedulerLink("tcp://server:1", kept)
    assert successor.name != link.name
    assert successor.unregistered(HELLO).index == 4
    kept.write_text("what is this")
    assert SchedulerLink("tcp://server:1", kept).unregistered(HELLO).index == -1


def test_the_operators_index_is_wanted_whatever_was_kept(tmp_path: Path) -> None:
    kept = tmp_path / "index"
    kept.write_text("4")
    named = SimulatedWorker(2, 0, num_blocks=4, block_size=4, max_rows=2, max_model_len=16).hello
    assert SchedulerLink("tcp://server:1", kept).unregistered(named).index == 2


def test_another_index_than_the_operators_is_refused_and_another_than_the_kept_one_is_not(tmp_path: Path) -> None:
    kept = tmp_path / "index"
    kept.write_text("0")
    link = SchedulerLink("tcp://server:1", kept)
    asking = link.unregistered(HELLO)
    assert asking.index == 0
    assert link.registered(asking, Welcome(link.name, 2, 77)).index == 2
    named = SimulatedWorker(0, 0, num_blocks=4, block_size=4, max_rows=2, max_model_len=16).hello
    demanding = SchedulerLink("tcp://server:1", None)
    with pytest.raises(Refused, match=r"--index 0 .*2 is free"):
        demanding.registered(demanding.unregistered(named), Welcome(demanding.name, 2, 77))


def test_a_refusal_that_may_pass_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    link = SchedulerLink("tcp://server:1", None, clock)
    for seconds, lines in ((0, 1), (1, 1), (SECONDS_BETWEEN_WARNINGS, 2)):
        clock.advance(seconds)
        link.refused_for_now("dtype is 'float32' here")
        assert caplog.text.count("until the others go: dtype is 'float32' here") == lines
