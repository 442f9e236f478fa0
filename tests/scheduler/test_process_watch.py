"""Watching real processes: their end is seen at once, and one that hangs is ended with its last frame on record."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from scheduler.process_watch import GRACE_SECONDS, ProcessWatch
from shared.liveness import last_frame
from tests.scheduler.clock import Clock

STUCK = """
import sys, time
from pathlib import Path
from shared.liveness import become
become("demo", Path(sys.argv[1]))
def the_place_where_it_hangs():
    print("up", flush=True)
    while True: time.sleep(0.01)
the_place_where_it_hangs()
"""


class Watched:
    def __init__(self, folder: Path) -> None:
        self.poller = zmq.Poller()
        self.clock = Clock()
        self.watch = ProcessWatch(self.poller, lambda index: folder / f"{index}.stack", self.clock)

    def ended(self, seconds: float = 0.0) -> list[tuple[int, int]]:
        return self.watch.ended([one for one, _ in self.poller.poll(int(seconds * 1000))])


@contextmanager
def stuck(file: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", STUCK, str(file)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_an_end_is_seen_at_once_and_once(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    with stuck(tmp_path / "3.stack") as process:
        assert watched.watch.add(3, 7, process.pid)
        assert watched.ended() == []
        process.kill()
        assert watched.ended(60) == [(3, 7)]
        assert watched.ended() == []


@pytest.mark.parametrize("stopped", [True, False])
def test_one_that_hangs_says_where_and_is_killed(tmp_path: Path, stopped: bool) -> None:
    watched = Watched(tmp_path)
    with stuck(tmp_path / "0.stack") as process:
        watched.watch.add(0, 1, process.pid)
        if stopped:
            process.send_signal(signal.SIGSTOP)
        watched.watch.mark_stalled(0, 1, "worker 0 stalled")
        while not last_frame(tmp_path / "0.stack"):
            time.sleep(0.01)
        assert watched.watch.kill_due() == [], "it has a moment to write its stack"
        watched.clock.advance(GRACE_SECONDS)
        [story] = watched.watch.kill_due()
        assert story.startswith("worker 0 stalled; last Python frame: File ")
        assert "the_place_where_it_hangs" in story
        assert watched.ended(60) == [(0, 1)]
        assert process.wait(60) == -signal.SIGKILL


def test_a_worker_elsewhere_is_not_killed(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.watch.mark_stalled(5, 0, "worker 5 stalled")
    watched.clock.advance(10)
    assert watched.watch.kill_due() == []


def test_a_process_that_is_gone_already_is_no_problem(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    watched = Watched(tmp_path)
    assert not watched.watch.add(0, 0, process.pid)
    assert watched.ended() == []
