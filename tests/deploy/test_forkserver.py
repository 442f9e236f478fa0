"""Processes that fork those that do their work: a dead one is followed by another that need not import again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.stage import Stage, actor, is_alive, wait_until_dead


def forking(*arguments: str, **fields: Any) -> dict[str, Any]:
    return actor("model_worker:0", *arguments, counts_starts=True, forks=True, **fields)


def serving(stage: Stage, epoch: int) -> int:
    """The process that serves in this epoch."""
    ready = stage.wait_for("event", event="ready")
    assert ready["epoch"] == epoch
    return int(ready["pid"])


def imports(stage: Stage) -> int:
    return len([event for event in stage.told("event") if event.get("name") == "import"])


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0 ")


def test_a_dead_fork_is_named_and_followed_by_another() -> None:
    with Stage(forking("--say", "ValueError: no more blocks", device="cpu"), first_delay=0.05) as stage:
        fork = serving(stage, 0)
        (parent,) = stage.children()
        for epoch in (1, 2, 3):
            os.kill(fork, signal.SIGKILL)
            assert stage.wait_for("exited")["pid"] == fork
            death = stage.wait_for("say", level="ERROR")["text"]
            assert "model_worker:0 (cpu) died" in death
            assert "SIGKILL" in death
            assert "ValueError: no more blocks" in death
            fork = serving(stage, epoch)
            assert title(fork).endswith(f"--epoch {epoch}]")
            assert stage.children() == [parent]
            assert title(parent) == "tokenyard: actor, for successors"
        assert imports(stage) == 1


@pytest.mark.parametrize("then", ["signal:SIGSEGV", "exit:3"])
def test_a_fork_that_ends_by_itself_is_one_that_died(then: str) -> None:
    with Stage(forking("--after", "0.1", "--then", then), first_delay=0.05, deaths=3) as stage:
        assert stage.end() == 1
        assert imports(stage) == 1
        assert len(stage.told("exited")) == 3
        how = "signal SIGSEGV; last error: Fatal Python error" if "SIGSEGV" in then else "exit code 3"
        assert all(how in text for text in stage.said[:3])


def test_a_fork_that_leaves_in_order_is_followed_at_once_and_no_death() -> None:
    with Stage(forking("--then", "leave", device="cpu"), first_delay=20.0, deaths=1) as stage:
        first = serving(stage, 0)
        assert stage.wait_for("exited")["pid"] == first
        assert stage.wait_for("say", level="INFO")["text"] == "model_worker:0 (cpu) leaves to a better one"
        second = serving(stage, 1)
        assert imports(stage) == 1
        os.kill(second, signal.SIGKILL)
        assert stage.end() == 1
        assert "1 deaths in a row" in stage.said[-1]


@pytest.mark.parametrize("how", ["signal:SIGKILL", "signal:SIGTERM", "exit:3"])
def test_one_that_never_served_is_followed_by_a_fresh_process(how: str) -> None:
    with Stage(forking("--never-ready", "--then", how), first_delay=0.05, deaths=2) as stage:
        assert stage.end() == 1
        assert imports(stage) == 2
        assert how.replace("signal:", "signal ").replace("exit:", "exit code ") in stage.said[0]


def test_a_successor_that_cannot_start_is_followed_by_a_fresh_process() -> None:
    with Stage(forking("--only-once"), first_delay=0.05, deaths=4) as stage:
        os.kill(serving(stage, 0), signal.SIGKILL)
        assert stage.end() == 1
        assert [len(stage.told("exited")), imports(stage)] == [4, 3]
        assert "once was enough" in stage.said[1]


def test_a_dead_parent_takes_its_fork_along() -> None:
    with Stage(forking("--then", "stubborn"), first_delay=0.05) as stage:
        fork = serving(stage, 0)
        (parent,) = stage.children()
        os.kill(parent, signal.SIGKILL)
        serving(stage, 1)
        assert not is_alive(fork)
        assert imports(stage) == 2


def test_a_parent_that_dies_while_it_waits_is_no_loss() -> None:
    with Stage(forking(), first_delay=2.0) as stage:
        fork = serving(stage, 0)
        (parent,) = stage.children()
        os.kill(fork, signal.SIGKILL)
        stage.wait_for("exited", pid=fork)
        os.kill(parent, signal.SIGKILL)
        assert is_alive(serving(stage, 1))
        assert parent not in stage.children()
        assert [len(stage.told("exited")), imports(stage)] == [1, 2]


@pytest.mark.parametrize("dead", [False, True])
def test_a_signal_ends_both(dead: bool) -> None:
    """Also while the parent waits for the time of the next fork."""
    with Stage(forking(), first_delay=20.0) as stage:
        fork = serving(stage, 0)
        (parent,) = stage.children()
        if dead:
            os.kill(fork, signal.SIGKILL)
            stage.wait_for("exited")
        stage.send(signal.SIGTERM)
        assert stage.end() == 0
        assert not is_alive(fork)
        assert not is_alive(parent)
        assert not any("did not stop" in text for text in stage.said)


def test_a_fork_that_ignores_sigterm_is_killed_after_its_time() -> None:
    with Stage(forking("--then", "stubborn", stop_seconds=0.3)) as stage:
        fork = serving(stage, 0)
        stage.send(signal.SIGTERM)
        assert stage.end() == 0
        assert "did not stop in 0.3 s: killed" in stage.said[-1]
        assert not is_alive(fork)


@pytest.mark.parametrize("dead", [False, True])
def test_a_killed_supervisor_leaves_neither(dead: bool) -> None:
    with Stage(forking(), first_delay=20.0) as stage:
        fork = serving(stage, 0)
        (parent,) = stage.children()
        if dead:
            os.kill(fork, signal.SIGKILL)
            stage.wait_for("exited")
        stage.send(signal.SIGKILL)
        wait_until_dead(fork, parent)


def test_what_a_fork_has_started_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with Stage(forking("--grandchild", str(file)), first_delay=20.0) as stage:
        fork, grandchild = serving(stage, 0), int(file.read_text())
        assert is_alive(grandchild)
        os.kill(fork, signal.SIGKILL)
        stage.wait_for("exited")
        wait_until_dead(grandchild)
        assert len(stage.children()) == 1


def test_a_fork_has_an_empty_standard_input() -> None:
    with Stage(forking()) as stage:
        fork = serving(stage, 0)
        assert os.readlink(f"/proc/{fork}/fd/0") == os.devnull
