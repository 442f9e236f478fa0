"""Children that live and are not heard, under a real supervisor."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from shared.liveness import nudge
from tests.deploy.stage import Stage, actor

# A busy machine lets a child wait for a second before it writes its stack.
QUICK = {"LOOK_SECONDS": 0.05, "QUIET_SECONDS": 1.0, "SECONDS_FOR_LAST_WORDS": 1.5}


def hanging(name: str, *arguments: str, hang_seconds: float = 2.0, **fields: Any) -> dict[str, Any]:
    return actor(name, *arguments, hang_seconds=hang_seconds, **fields)


def test_a_child_that_hangs_is_named_killed_and_replaced(tmp_path: Path) -> None:
    stack = tmp_path / "stack"
    child = hanging(
        "api_server:1", "--beat-for", "0.5", "--stack", str(stack), counts_starts=True, stack_file=str(stack)
    )
    with Stage(child, watch=QUICK, first_delay=0.05) as stage:
        assert stage.wait_for("silent", child="api_server:1")["seconds"] >= 1
        stage.wait_for("hung", child="api_server:1")
        death = stage.wait_for("say", level="ERROR")["text"]
        for fact in ("api_server:1 died", "SIGKILL", "it hung, silent for", "last Python frame", "actor.py"):
            assert fact in death
        assert any("most recent call first" in entry["line"] for entry in stage.told("output"))
        assert stage.wait_for("event", event="ready")["epoch"] == 1
        time.sleep(3)
        stage.send(signal.SIGTERM)
        assert stage.end() == 0
        assert len(stage.told("hung")) == 1, "the next one is heard"


def test_the_fork_of_a_worker_is_watched_like_any_other(tmp_path: Path) -> None:
    stack = tmp_path / "stack"
    arguments = ("--beat-for", "0.5", "--stack", str(stack))
    child = hanging("model_worker:0", *arguments, counts_starts=True, forks=True, stack_file=str(stack))
    with Stage(child, watch=QUICK, first_delay=0.05) as stage:
        stage.wait_for("hung")
        assert "actor.py" in stage.wait_for("say", level="ERROR")["text"]
        assert stage.wait_for("event", event="ready")["epoch"] == 1


def test_a_child_that_was_only_stopped_goes_on() -> None:
    """What it was doing is worth more than a fresh process."""
    child = hanging("scheduler", "--beat-for", "1000")
    with Stage(child, watch=QUICK | {"SECONDS_FOR_LAST_WORDS": 60.0}) as stage:
        stage.wait_for("all_ready")
        time.sleep(0.3)
        (pid,) = stage.children()
        os.kill(pid, signal.SIGSTOP)
        assert stage.wait_for("silent")["seconds"] > 0
        assert "goes on" in stage.wait_for("say", level="WARNING")["text"]
        assert stage.wait_for("silent")["seconds"] == 0
        assert stage.children() == [pid]
        stage.send(signal.SIGTERM)
        assert stage.end() == 0
        assert not stage.told("hung")


def test_without_a_limit_or_a_beat_a_child_may_be_silent() -> None:
    with Stage(actor("a", "--beat-for", "0.2"), hanging("b"), watch=QUICK) as stage:
        stage.wait_for("all_ready")
        time.sleep(3)
        stage.send(signal.SIGTERM)
        assert stage.end() == 0
        assert not stage.told("silent")
        assert not stage.told("hung")


def test_a_start_that_never_ends_is_ended() -> None:
    child = hanging("model_worker:0", "--never-ready")
    with Stage(child, watch=QUICK | {"START_SECONDS": 1.0}, deaths=1) as stage:
        assert stage.end() == 1
        assert "it hung, silent for" in stage.said[-1]


def test_while_everything_stood_still_nobody_is_blamed() -> None:
    """The supervisor and its child are stopped together, as by a suspended machine; it goes on first."""
    child = hanging("scheduler", "--beat-for", "1000", hang_seconds=3.5)
    with Stage(child, watch=QUICK | {"STANDSTILL_SECONDS": 1.5}) as stage:
        stage.wait_for("all_ready")
        time.sleep(0.3)
        (pid,) = stage.children()
        for one in (stage.process.pid, pid):
            os.kill(one, signal.SIGSTOP)
        time.sleep(4)
        os.kill(stage.process.pid, signal.SIGCONT)
        assert "stood still" in stage.wait_for("say", level="WARNING")["text"]
        os.kill(pid, signal.SIGCONT)
        time.sleep(1)
        assert stage.children() == [pid]
        stage.send(signal.SIGTERM)
        assert stage.end() == 0
        assert not stage.told("hung")


def test_a_signal_is_only_for_processes_of_the_child() -> None:
    """A process id may have become another's: nothing is sent to who is not of the group."""
    received: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: received.append(number))
    try:
        nudge(os.getpid(), 1, has_stack_file=True)
        assert not received
        nudge(os.getpid(), os.getpgrp(), has_stack_file=True)
        assert received == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)
