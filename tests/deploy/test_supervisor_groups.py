"""Groups of real processes: one member dies, and all of them end and start again together."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from deploy.child import ChildSpec
from tests.deploy.stage import Stage, actor

PAIR = ("model_worker:0", "mask_maker:0")


def member(name: str, *arguments: str, group: str = "0", **fields: Any) -> dict[str, Any]:
    return actor(name, *arguments, group=group, counts_starts=True, **fields)


def ready_pids(stage: Stage, epoch: int, names: tuple[str, ...] = PAIR) -> dict[str, int]:
    """Waits until these children serve as this epoch. Returns their process ids."""
    pids: dict[str, int] = {}
    while len(pids) < len(names):
        event = stage.wait_for("event", event="ready", epoch=epoch)
        if event["child"] in names:
            pids[event["child"]] = event["pid"]
    return pids


def happened(stage: Stage) -> list[tuple[str, str]]:
    return [(entry["kind"], entry["child"]) for entry in stage.story if entry["kind"] in ("started", "exited")]


@pytest.mark.parametrize("victim", PAIR)
def test_a_killed_member_takes_its_group_along_and_no_other_child(victim: str) -> None:
    other_pair = ("model_worker:1", "mask_maker:1")
    children = [actor("scheduler"), *(member(name, group=name[-1]) for name in (*PAIR, *other_pair))]
    with Stage(*children, first_delay=0.05) as stage:
        pids = ready_pids(stage, 0, (*PAIR, *other_pair))
        before = set(stage.children())
        os.kill(pids[victim], signal.SIGKILL)
        companion = next(name for name in PAIR if name != victim)
        death = stage.wait_for("say", level="ERROR")["text"]
        assert f"{victim} died" in death
        assert "SIGKILL" in death
        assert death.endswith(f"starting it again in 0.05 s, with the rest of its group: {companion}")
        assert ready_pids(stage, 1).keys() == set(PAIR)
        assert happened(stage)[5:] == [("exited", victim), ("exited", companion), *(("started", name) for name in PAIR)]
        assert before - set(stage.children()) == {pids[name] for name in PAIR}
        stage.send(signal.SIGTERM)
        assert stage.end() == 0
        assert sum("died" in text for text in stage.said) == 1


def test_a_member_that_does_not_end_is_killed_in_its_time_and_the_group_waits_for_that() -> None:
    stubborn = member(PAIR[1], "--then", "stubborn", stop_seconds=0.5)
    with Stage(member(PAIR[0]), stubborn, first_delay=0.01) as stage:
        os.kill(ready_pids(stage, 0)[PAIR[0]], signal.SIGKILL)
        ready_pids(stage, 1)
        assert f"{PAIR[1]} did not stop in 0.5 s: killed" in stage.said
        died, killed = (entry["at"] for entry in stage.told("exited"))
        assert 0.4 < killed - died < 5.0
        assert all(entry["at"] >= killed for entry in stage.told("started")[2:])


def test_a_stopped_companion_is_killed_in_its_time() -> None:
    with Stage(*(member(name, stop_seconds=0.3) for name in PAIR), first_delay=0.01) as stage:
        pids = ready_pids(stage, 0)
        os.kill(pids[PAIR[0]], signal.SIGSTOP)
        os.kill(pids[PAIR[1]], signal.SIGKILL)
        assert not set(ready_pids(stage, 1).values()) & set(pids.values())
        assert f"{PAIR[0]} did not stop in 0.3 s: killed" in stage.said


def test_a_member_that_hangs_takes_its_group_along() -> None:
    # A busy machine lets the next one wait for a second between two beats.
    watch = {"LOOK_SECONDS": 0.05, "QUIET_SECONDS": 1.0, "SECONDS_FOR_LAST_WORDS": 0.1}
    hanging = member(PAIR[0], "--beat-for", "0.3", hang_seconds=2.0)
    with Stage(hanging, member(PAIR[1]), watch=watch, first_delay=0.05) as stage:
        ready_pids(stage, 0)
        stage.wait_for("hung", child=PAIR[0])
        ready_pids(stage, 1)
        (death,) = (text for text in stage.said if "died" in text)
        assert "it hung, silent for" in death
        assert death.endswith(f"group: {PAIR[1]}")


def test_members_of_a_fork_server_are_forked_again_or_started_anew() -> None:
    with Stage(member(PAIR[0], forks=True), member(PAIR[1], forks=True), first_delay=0.05) as stage:
        pids = ready_pids(stage, 0)
        for epoch in range(1, 4):
            servers = set(stage.children())
            os.kill(pids[PAIR[epoch % 2]], signal.SIGKILL)
            pids = ready_pids(stage, epoch)
            assert len(servers & set(stage.children())) == 1, "the fork server of the killed member is still there"
        stage.send(signal.SIGTERM)
        assert stage.end() == 0
        assert sum("died" in text for text in stage.said) == 3


def test_members_that_die_in_turn_are_one_group_that_keeps_dying() -> None:
    """Each member dies by itself, and the delays double for all: the group has not served in between."""
    children = (member(PAIR[0], "--after", "0.3", "--then", "exit:3"), member(PAIR[1], "--never-ready"))
    with Stage(*children, first_delay=0.05, settled_after=0.1, deaths=4) as stage:
        assert stage.end() == 1
        assert len(stage.told("started")) == 8
        for delay in ("0.05", "0.1", "0.2"):
            assert sum(f"starting it again in {delay} s, with" in text for text in stage.said) == 1
        assert "that is 4 deaths in a row" in stage.said[-1]


@pytest.mark.parametrize("forks", [False, True])
def test_a_group_that_misses_ranks_on_other_hosts_tries_again_and_does_not_give_up(forks: bool) -> None:
    waits = member("model_worker:0", "--never-ready", "--then", "missed", forks=forks)
    with Stage(waits, member("model_worker:1", "--never-ready"), longest_delay=0.02, deaths=1) as stage:
        while len(stage.told("started")) < 8:
            stage.wait_for("started")
        stage.send(signal.SIGTERM)
        assert stage.end() == 0
        assert stage.said.count("model_worker:0: rank 1 of 2 has not come; it tries again in 0.02 s") >= 3
        assert not any("died" in text for text in stage.said)


def test_a_group_of_one_role_is_given_up_though_its_other_members_serve() -> None:
    children = (member("model_worker:0", "--then", "exit:3"), member("model_worker:1"))
    with Stage(*children, first_delay=0.01, deaths=3) as stage:
        assert stage.end() == 1
        assert "giving up: model_worker:0 died" in stage.said[-1]


def test_what_is_left_of_a_role_outside_the_group_goes_on() -> None:
    dying = (member("model_worker:0", "--then", "exit:3"), member("model_worker:1"))
    with Stage(*dying, actor("model_worker:2"), first_delay=0.01, longest_delay=0.02, deaths=2) as stage:
        for _ in range(8):
            stage.wait_for("exited")
        stage.send(signal.SIGTERM)
        assert stage.end() == 0
        assert not any("giving up" in text for text in stage.said)


def test_a_signal_ends_a_group_that_is_just_being_started_again() -> None:
    stubborn = member(PAIR[1], "--then", "stubborn", stop_seconds=2.5)
    with Stage(member(PAIR[0]), stubborn, first_delay=0.01) as stage:
        os.kill(ready_pids(stage, 0)[PAIR[0]], signal.SIGKILL)
        stage.wait_for("say", level="ERROR")
        stage.send(signal.SIGTERM)
        assert stage.end() == 0
        assert len(stage.told("started")) == 2


def test_a_rolling_child_has_no_group() -> None:
    with pytest.raises(ValueError, match="api_server:0 is rolling and has the group 'a'"):
        ChildSpec("api_server:0", ["true"], rolling=True, group="a")
