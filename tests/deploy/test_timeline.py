"""The start-up time line: plain lines for files, live bars for terminals."""

from __future__ import annotations

import io
import json
import re
import time

import pytest
from rich.console import Console

from deploy.child import ChildSpec
from deploy.timeline import Timeline
from shared import logs

WORKER, SCHEDULER = ChildSpec("model_worker:0", []), ChildSpec("scheduler", [])


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("deploy.timeline.time.monotonic", clock)
    return clock


@pytest.fixture(autouse=True)
def terminal_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a machine may be a "dumb" one, which gets no bars."""
    monkeypatch.setenv("TERM", "xterm")


def plain() -> tuple[Timeline, io.StringIO]:
    file = io.StringIO()
    return Timeline(console=Console(file=file, force_terminal=False)), file


def test_one_line_per_process_with_the_time_of_each_phase(clock: Clock) -> None:
    timeline, file = plain()
    timeline.started(WORKER)
    for seconds, phase in ((0.2, "import"), (1.9, "load weights"), (0.4, "allocate KV"), (0.01, "compile kernels")):
        clock.now += seconds
        timeline.event(WORKER, {"event": "phase", "name": phase})
    clock.now += 0.8
    timeline.event(WORKER, {"event": "ready", "blocks": 512, "attention": "cpu"})
    assert file.getvalue() == (
        "  model_worker:0  start python 0.2s | import 1.9s | load weights 0.4s | compile kernels 0.8s | ready 3.3s"
        "  (blocks 512, attention cpu)\n"
    )


def test_in_json_every_line_is_an_object_whoever_wrote_it(clock: Clock) -> None:
    file = io.StringIO()
    timeline = Timeline(console=Console(file=file, force_terminal=True), form="json")
    timeline.started(WORKER)
    clock.now += 0.2
    timeline.event(WORKER, {"event": "phase", "name": "import"})
    clock.now += 0.3
    timeline.event(WORKER, {"event": "ready", "blocks": 512})
    timeline.output("Fatal Python error")
    timeline.output(logs.line("json", 0.0, "INFO", "scheduler", "mine", {}))
    timeline.say("ERROR", "it died")
    ready, raw, own, said = map(json.loads, file.getvalue().splitlines())
    assert ready["message"] == "model_worker:0 is ready: start python 0.2s | import 0.3s | ready 0.5s"
    assert (ready["role"], ready["process"], ready["blocks"]) == ("supervisor", "model_worker:0", 512)
    assert (raw["role"], raw["message"]) == ("output", "Fatal Python error")
    assert (own["role"], own["message"], own["time"]) == ("scheduler", "mine", "1970-01-01T00:00:00.000Z")
    assert (said["level"], said["role"], said["message"]) == ("error", "supervisor", "it died")


def test_a_restart_is_timed_anew(clock: Clock) -> None:
    timeline, file = plain()
    for seconds in (1.0, 2.0):
        timeline.started(SCHEDULER)
        clock.now += seconds
        timeline.event(SCHEDULER, {"event": "ready"})
        timeline.exited(SCHEDULER, 1)
    assert (
        file.getvalue() == "  scheduler  start python 1.0s | ready 1.0s\n  scheduler  start python 2.0s | ready 2.0s\n"
    )


def test_long_work_tells_its_progress_now_and_then(clock: Clock) -> None:
    timeline, file = plain()
    timeline.started(WORKER)
    timeline.event(WORKER, {"event": "phase", "name": "load weights"})
    for step in range(101):
        clock.now += 0.25
        timeline.event(WORKER, {"event": "progress", "done": step * 10**8, "total": 10**10, "unit": "bytes"})
    lines = file.getvalue().splitlines()
    done = ["1.9", "3.9", "5.9", "7.9", "9.9"]
    assert lines == [f"  model_worker:0  load weights: {amount} of 10.0 GB" for amount in done]


def plain_text(file: io.StringIO) -> str:
    """What a terminal was given, without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


def test_a_terminal_gets_bars_and_keeps_the_lines() -> None:
    file = io.StringIO()
    timeline = Timeline(console=Console(file=file, force_terminal=True, width=100))
    for child in (WORKER, SCHEDULER):
        timeline.started(child)
    timeline.event(WORKER, {"event": "phase", "name": "load weights"})
    timeline.event(WORKER, {"event": "progress", "done": 30, "total": 40, "unit": "tensors"})
    deadline = time.monotonic() + 60
    while "30 of 40 tensors" not in plain_text(file):  # the bars are drawn ten times a second
        assert time.monotonic() < deadline
        time.sleep(0.02)
    timeline.output("a line of [red]a child[/red] that is " + "long " * 40)
    for child in (WORKER, SCHEDULER):
        timeline.event(child, {"event": "ready"})
    timeline.output("after the bars")
    shown = plain_text(file)
    assert "load weights" in shown
    assert "30 of 40 tensors" in shown
    assert "a line of [red]a child[/red] that is " + "long " * 40 + "\n" in shown
    assert "━" in shown
    assert shown.endswith("after the bars\n")
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1


def test_closing_gives_the_cursor_back_when_a_start_was_cut_short() -> None:
    file = io.StringIO()
    timeline = Timeline(console=Console(file=file, force_terminal=True))
    timeline.started(WORKER)
    timeline.close()
    assert file.getvalue().count("\x1b[?25h") == 1


def test_a_reader_that_went_away_does_not_end_the_server() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    timeline = Timeline(console=Console(file=Broken(), force_terminal=False))
    timeline.say("ERROR", "nobody hears this")


def test_readiness_and_ends_are_passed_on() -> None:
    heard: list[object] = []
    console = Console(file=io.StringIO(), force_terminal=False)
    timeline = Timeline(on_ready=lambda: heard.append("ready"), on_exit=heard.append, console=console)
    timeline.started(WORKER)
    timeline.all_ready()
    timeline.exited(WORKER, 77)
    assert heard == ["ready", 77]
