"""Roles from command lines, and CPU seconds of real child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from benchmarks.processes import OTHER, CpuTimes, freeze, per_thousand_tokens, role_of, thaw, tree


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("python -m api_server --scheduler ipc:///run/scheduler.sock", "api_server"),
        ("tokenyard: model_worker cpu, scheduler at tcp://host:1", "model_worker"),
        ("python -m scheduler /run/model_worker-0.sock", "scheduler"),
        ("python -m multiprocessing.resource_tracker", None),
        ("", None),
    ],
)
def test_the_module_named_first_is_the_role(command: str, role: str | None) -> None:
    assert role_of(command.split()) == role


def test_cpu_seconds_of_children_by_role() -> None:
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ntime.sleep(30)"
    before = CpuTimes.of(os.getpid())
    busy = subprocess.Popen([sys.executable, "-c", burn, "model_worker"])
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)", "api_server"])
    try:
        deadline = time.monotonic() + 20
        while (used := CpuTimes.of(os.getpid()).since(before)).get("model_worker", 0.0) < 0.3:
            assert time.monotonic() < deadline, used
            time.sleep(0.05)
        # This process is the supervisor here, and uses CPU time itself.
        assert set(used) == {"model_worker", "api_server", OTHER}
        assert used["api_server"] < 0.3 <= used["model_worker"] < 3
    finally:
        busy.kill()
        idle.kill()
        busy.wait()
        idle.wait()


def test_seconds_count_from_the_earlier_moment_and_new_processes_from_their_start() -> None:
    before = CpuTimes({"api_server": {1: 5.0}, "scheduler": {2: 7.0}})
    after = CpuTimes({"api_server": {1: 6.0, 3: 0.5}, "model_worker": {4: 2.0}})
    assert after.since(before) == {"api_server": 1.5, "model_worker": 2.0}


def test_a_supervisor_that_is_gone_has_no_children() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert CpuTimes.of(gone.pid) == CpuTimes({})


def test_per_thousand_tokens() -> None:
    assert per_thousand_tokens({"scheduler": 3.0}, 2000) == {"scheduler": 1.5}
    assert per_thousand_tokens({"scheduler": 3.0}, 0) == {}


def test_a_frozen_tree_stands_still_until_it_is_thawed() -> None:
    burn = "while True: pass"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {burn!r}]).wait()"
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    try:
        _wait_for(lambda: _used(process.pid) > 0.05)
        freeze(process.pid)
        _wait_for(lambda: {entry.status() for entry in tree(process.pid)} == {psutil.STATUS_STOPPED})
        still = _used(process.pid)
        time.sleep(0.2)
        assert _used(process.pid) == still
        thaw(process.pid)
        _wait_for(lambda: _used(process.pid) > still + 0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _used(pid: int) -> float:
    return sum(CpuTimes.of(pid).since(CpuTimes({})).values())


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
