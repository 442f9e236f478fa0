"""The supervisor against real processes that serve, die, crash, hang and refuse to stop."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attempts import quickest
from tests.deploy.stage import Stage, actor, is_alive, wait_until_dead


def test_a_dead_child_is_named_and_started_again_with_the_next_epoch() -> None:
    child = actor("model_worker:0", "--say", "ValueError: no more blocks", device="cpu", counts_starts=True)
    with Stage(child, first_delay=0.05) as stage:
        stage.wait_for("all_ready")
        (pid,) = stage.children()
        os.kill(pid, signal.SIGKILL)
        death = stage.wait_for("say", level="ERROR")["text"]
        assert "model_worker:0 (cpu) died" in death
        assert "SIGKILL" in death
        assert "ValueError: no more blocks" in death
        assert stage.wait_for("event", event="ready")["epoch"] == 1
        assert stage.children() != [pid]


def test_a_child_that_leaves_in_order_is_followed_at_once() -> None:
    with Stage(actor("worker", "--then", "leave", counts_starts=True), first_delay=20.0) as stage:
        assert stage.wait_for("event", event="ready")["epoch"] == 0
        assert stage.wait_for("event", event="ready")["epoch"] == 1
        assert stage.said == ["worker leaves to a better one"]


def test_a_crash_in_native_code_is_named() -> None:
    with Stage(actor("worker", "--then", "signal:SIGSEGV"), deaths=1) as stage:
        assert stage.end() == 1
        assert "signal SIGSEGV; last error: Fatal Python error: Segmentation fault" in stage.said[-1]


def test_a_death_is_noticed_at_once() -> None:
    def seconds_until_noticed() -> float:
        with Stage(actor("scheduler"), first_delay=5.0) as stage:
            stage.wait_for("all_ready")
            (pid,) = stage.children()
            os.kill(pid, signal.SIGKILL)
            killed = stage.wait_for("exited", pid=pid)["at"]
            return float(killed - stage.told("all_ready")[0]["at"])

    assert quickest(seconds_until_noticed, below=1.0) < 1.0


def test_delays_double_up_to_the_longest() -> None:
    with Stage(actor("worker", "--then", "exit:7"), first_delay=0.05, longest_delay=0.2, deaths=6) as stage:
        assert stage.end() == 1
        starts = [entry["at"] for entry in stage.told("started")]
        ends = [entry["at"] for entry in stage.told("exited")]
        pauses = [start - end for start, end in zip(starts[1:], ends, strict=False)]
        for pause, delay in zip(pauses, (0.05, 0.1, 0.2, 0.2, 0.2), strict=True):
            assert pause >= delay - 0.01
        told = [re.search(r"again in (\S+) s", text) for text in stage.said]
        assert [float(found[1]) for found in told if found] == [0.05, 0.1, 0.2, 0.2, 0.2]


def test_the_delay_falls_back_after_the_child_has_served_for_a_while() -> None:
    child = actor("worker", "--after", "0.8", "--then", "exit:1")
    with Stage(child, first_delay=0.05, settled_after=0.2, deaths=2) as stage:
        for _ in range(4):
            stage.wait_for("event", event="ready")
        stage.send(signal.SIGTERM)
        assert stage.end() == 0
        assert sum("again in 0.05 s" in text for text in stage.said) >= 3


def test_it_gives_up_on_a_child_that_keeps_dying_and_stops_the_others() -> None:
    children = (actor("scheduler"), actor("model_worker:0", "--then", "exit:3", device="cpu"))
    with Stage(*children, first_delay=0.01, deaths=3) as stage:
        assert stage.end() == 1
        assert len(stage.told("started")) == 4
        assert "giving up: model_worker:0 (cpu) died" in stage.said[-1]
        assert "exit code 3" in stage.said[-1]
        wait_until_dead(*(entry["pid"] for entry in stage.told("exited")))


def test_the_others_serve_without_a_child_that_is_not_vital() -> None:
    children = (actor("weight_keeper:0", "--never-ready", "--then", "exit:3", vital=False), actor("model_worker:0"))
    with Stage(*children, first_delay=0.01, longest_delay=0.02, deaths=2) as stage:
        stage.wait_for("all_ready")
        for _ in range(4):
            stage.wait_for("exited")
        stage.send(signal.SIGTERM)
        assert stage.end() == 0
        assert not any("giving up" in text for text in stage.said)


def test_a_child_that_is_not_vital_and_cannot_be_started_is_tried_again_later() -> None:
    missing = {"name": "weight_keeper:0", "argv": ["/no/such/program"], "vital": False}
    with Stage(missing, actor("model_worker:0"), first_delay=0.3) as stage:
        first, second = (stage.wait_for("say", level="ERROR") for _ in range(2))
        assert "weight_keeper:0 cannot be started" in first["text"]
        assert second["at"] - first["at"] >= 0.29
        stage.send(signal.SIGTERM)
        assert stage.end() == 0


def test_it_gives_up_on_slow_starts_that_never_succeed() -> None:
    child = actor("worker", "--never-ready", "--after", "0.2", "--then", "exit:1")
    with Stage(child, first_delay=0.01, settled_after=0.1, deaths=3) as stage:
        assert stage.end() == 1
        assert len(stage.told("started")) == 3


def test_what_is_left_of_a_role_goes_on() -> None:
    children = (actor("model_worker:0"), actor("model_worker:1", "--then", "exit:3"))
    with Stage(*children, first_delay=0.01, longest_delay=0.02, deaths=2) as stage:
        stage.wait_for("event", event="ready", child="model_worker:0")
        for _ in range(6):
            stage.wait_for("exited")
        stage.send(signal.SIGTERM)
        assert stage.end() == 0
        assert not any("giving up" in text for text in stage.said)


def test_it_gives_up_on_a_model_that_never_starts_beside_one_that_serves() -> None:
    serves = actor("model_worker:0")
    dies = actor("model_worker:embed:0", "--never-ready", "--then", "exit:3", model="embed:")
    with Stage(serves, dies, first_delay=0.01, longest_delay=0.02, deaths=3) as stage:
        assert stage.end() == 1
        assert any("3 deaths in a row" in text for text in stage.said)


def test_it_gives_up_when_nobody_of_a_role_serves() -> None:
    children = [actor(f"model_worker:{i}", "--never-ready", "--then", "exit:3") for i in range(3)]
    with Stage(*children, first_delay=0.01, longest_delay=0.02, deaths=3) as stage:
        assert stage.end() == 1
        assert any("3 deaths in a row" in text for text in stage.said)


def test_a_fatal_report_ends_everything_with_its_message() -> None:
    with Stage(actor("scheduler"), actor("model_worker:0", "--fatal", "no such architecture: frobnicator")) as stage:
        assert stage.end() == 2
        assert stage.said == ["giving up: model_worker:0 cannot work: no such architecture: frobnicator"]
        assert len(stage.told("started")) == 2


def test_what_may_pass_is_tried_again_and_says_why() -> None:
    child = actor("model_worker:0", "--never-ready", "--fatal", "no GPU yet", "--may-pass", "--then", "exit:78")
    with Stage(child, first_delay=0.01, deaths=3) as stage:
        assert stage.end() == 1
        assert stage.said.count("model_worker:0 cannot work: no GPU yet") == 3
        assert "3 deaths in a row" in stage.said[-1]


def test_a_command_that_does_not_exist_is_no_mystery() -> None:
    with Stage({"name": "scheduler", "argv": ["/no/such/python"]}) as stage:
        assert stage.end() == 1
        assert "scheduler cannot be started" in stage.said[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_role_by_role_the_last_first(number: signal.Signals) -> None:
    names = ["scheduler", "model_worker:0", "model_worker:1", "api_server:0"]
    with Stage(*map(actor, names)) as stage:
        stage.wait_for("all_ready")
        stage.send(number)
        assert stage.end() == 0
        ended = [entry["child"] for entry in stage.told("exited")]
        assert ended[0] == "api_server:0"
        assert set(ended[1:3]) == {"model_worker:0", "model_worker:1"}
        assert ended[3] == "scheduler"


def test_a_signal_during_the_start_is_obeyed() -> None:
    with Stage(actor("scheduler", "--never-ready"), actor("api_server:0", "--never-ready")) as stage:
        stage.wait_for("started")
        stage.send(signal.SIGTERM)
        assert stage.end() == 0


def test_a_child_that_ignores_sigterm_is_killed_after_its_time() -> None:
    with Stage(actor("api_server:0", "--then", "stubborn", stop_seconds=0.4)) as stage:
        stage.wait_for("all_ready")
        stage.send(signal.SIGTERM)
        assert stage.end() == 0
        asked, ended = stage.told("say")[0]["at"], stage.told("exited")[0]["at"]
        assert ended - asked > 0.35
        assert "did not stop in 0.4 s" in stage.said[-1]


def test_a_second_ctrl_c_stops_at_once() -> None:
    stubborn = ("--then", "stubborn")
    with Stage(actor("scheduler", *stubborn, stop_seconds=60), actor("api:0", *stubborn, stop_seconds=60)) as stage:
        stage.wait_for("all_ready")
        stage.send(signal.SIGINT)
        stage.wait_for("say")
        with pytest.raises(subprocess.TimeoutExpired):
            stage.process.wait(timeout=0.4)
        stage.send(signal.SIGINT)
        assert stage.end() == 0
        assert len(stage.told("exited")) == 2


def test_one_keystroke_that_arrives_twice_is_one() -> None:
    with Stage(actor("api_server:0", "--then", "stubborn", stop_seconds=0.8)) as stage:
        stage.wait_for("all_ready")
        for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
            stage.send(number)
        assert stage.end() == 0
        assert "did not stop in 0.8 s" in stage.said[-1]


def test_a_successor_is_started_before_the_old_one_leaves() -> None:
    children = (actor("scheduler"), *(actor(f"api_server:{i}", rolling=True) for i in range(2)))
    with Stage(*children, deaths=1) as stage:
        stage.wait_for("all_ready")
        before = stage.children()
        stage.send(signal.SIGHUP)
        for i in range(2):
            stage.wait_for("say", text=f"api_server:{i} was restarted")
            stage.wait_for("exited", pid=before[1 + i])
        stage.send(signal.SIGTERM)
        assert stage.end() == 0
        told = [e for e in stage.story if e["kind"] in ("started", "exited") or e.get("event") == "ready"]
        for i in range(2):
            turns = [(e["kind"], e.get("pid")) for e in told if e["child"] == f"api_server:{i}"]
            assert [kind for kind, _ in turns] == ["started", "event", "started", "event", "exited", "exited"]
            assert turns[1] == ("event", before[1 + i])
            assert turns[4] == ("exited", before[1 + i])
        assert not any("died" in text for text in stage.said)


def test_a_successor_that_cannot_start_changes_nothing(tmp_path: Path) -> None:
    """As when a certificate was renewed with a file that cannot be read."""
    broken = tmp_path / "broken"
    child = actor("api_server:0", "--fatal-if", str(broken), rolling=True)
    other = actor("api_server:1", rolling=True)
    with Stage(child, other, deaths=1) as stage:
        stage.wait_for("all_ready")
        before = stage.children()
        broken.write_text("no such certificate")
        stage.send(signal.SIGHUP)
        stage.wait_for("say", text="api_server:0 cannot work: no such certificate")
        assert "api_server:0 was not restarted" in stage.wait_for("say", level="ERROR")["text"]
        assert stage.children() == before
        broken.unlink()
        stage.send(signal.SIGHUP)
        for i in range(2):
            stage.wait_for("say", text=f"api_server:{i} was restarted")
        stage.send(signal.SIGTERM)
        assert stage.end() == 0


def test_one_that_leaves_is_stopped_with_the_others() -> None:
    child = actor("api_server:0", "--then", "slow to retire", rolling=True)
    with Stage(child) as stage:
        stage.wait_for("all_ready")
        (old,) = stage.children()
        stage.send(signal.SIGHUP)
        stage.wait_for("say", text="api_server:0 was restarted")
        assert len(stage.children()) == 2
        os.kill(next(pid for pid in stage.children() if pid != old), signal.SIGKILL)
        assert "api_server:0 died" in stage.wait_for("say", level="ERROR")["text"]
        stage.wait_for("event", event="ready")
        assert old in stage.children()
        stage.send(signal.SIGTERM)
        assert stage.end() == 0
        wait_until_dead(old)


def test_sighup_of_a_terminal_that_went_away_stops() -> None:
    """A pseudo-terminal is closed under a supervisor that it controls, as when a window or an ssh session ends."""
    master, slave = os.openpty()
    plan = json.dumps({"children": [actor("scheduler")], "policy": {}, "watch": {}})
    code = (
        "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        f"os.execv(sys.executable, [sys.executable, '-m', 'tests.deploy.stage', {plan!r}])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        os.close(slave)
        assert process.stdout is not None
        assert any('"all_ready"' in line for line in process.stdout)
        os.close(master)
        rest = process.stdout.read()
        assert process.wait(60) == 0
    assert "SIGHUP: stopping in order" in rest


def test_ctrl_c_at_the_terminal_does_not_reach_the_children() -> None:
    """They lead their own sessions, so the order of stopping is the supervisor's alone."""
    with Stage(actor("scheduler"), actor("api_server:0")) as stage:
        stage.wait_for("all_ready")
        assert all(os.getsid(pid) == pid for pid in stage.children())


def test_a_worker_that_dies_while_the_api_drains_is_still_replaced() -> None:
    children = (actor("model_worker:0"), actor("api_server:0", "--then", "stubborn", stop_seconds=60))
    with Stage(*children, first_delay=0.01) as stage:
        stage.wait_for("all_ready")
        worker, api = stage.children()
        stage.send(signal.SIGTERM)
        stage.wait_for("say")
        os.kill(worker, signal.SIGKILL)
        assert stage.wait_for("event", event="ready")["child"] == "model_worker:0"
        os.kill(api, signal.SIGKILL)
        assert stage.end() == 0


def test_a_killed_supervisor_leaves_no_orphans() -> None:
    with Stage(actor("scheduler"), actor("model_worker:0"), actor("api_server:0")) as stage:
        stage.wait_for("all_ready")
        orphans = stage.children()
        assert len(orphans) == 3
        stage.send(signal.SIGKILL)
        stage.process.wait()
        wait_until_dead(*orphans)


def test_what_a_child_has_started_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with Stage(actor("worker", "--grandchild", str(file)), first_delay=5.0) as stage:
        stage.wait_for("all_ready")
        grandchild = int(file.read_text())
        assert is_alive(grandchild)
        os.kill(stage.children()[0], signal.SIGKILL)
        stage.wait_for("exited")
        wait_until_dead(grandchild)


def test_output_passes_through_line_by_line_even_when_a_child_dies_in_mid_line() -> None:
    code = "import sys, os; print('one'); print('zwei ü', file=sys.stderr); os.write(1, b'half \\xff'); os._exit(4)"
    with Stage({"name": "noisy", "argv": [sys.executable, "-u", "-c", code]}, deaths=1) as stage:
        assert stage.end() == 1
        assert [entry["line"] for entry in stage.told("output")] == ["one", "zwei ü", "half \ufffd"]


def test_a_flood_of_output_holds_nobody_up() -> None:
    code = "import sys\nfor i in range(50_000): print('x' * 60, i)\nsys.stdout.flush()\nprint('done ' + 'y' * 300_000)"
    with Stage({"name": "flood", "argv": [sys.executable, "-c", code]}, deaths=1) as stage:
        assert stage.end() == 1
        lines = [entry["line"] for entry in stage.told("output")]
        assert lines[49_999].endswith(" 49999")
        assert "".join(lines[50_000:]) == "done " + "y" * 300_000


def test_every_child_gets_an_empty_standard_input() -> None:
    with Stage({"name": "reader", "argv": [sys.executable, "-c", "print(repr(input()))"]}, deaths=1) as stage:
        assert stage.end() == 1
        assert "EOFError" in stage.said[-1]
