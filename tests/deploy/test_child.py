"""One child process: what it says, how it ends, and what is left of it."""

from __future__ import annotations

import os
import select
import signal
import sys

import pytest

from deploy.child import Child, ChildSpec, describe_exit


def run(code: str) -> tuple[Child, int]:
    """A child that has ended, with its output read."""
    child = Child(ChildSpec("demo", [sys.executable, "-c", code]), epoch=0)
    assert select.select([child.sentinel], [], [], 20)[0], "the sentinel does not tell the end"
    status = child.reap()
    while child.read_output():
        pass
    child.close()
    return child, status


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ValueError('no such device')", "ValueError: no such device"),
        ("import sys; sys.exit('cannot listen on port 80')", "cannot listen on port 80"),
        ("print('KeyError: 7'); print(); print('bye')", "KeyError: 7"),
        (
            "print('2026-11-25T12:00:00.123Z ERROR   worker: out of blocks'); "
            "print('2026-11-25T12:00:01.123Z INFO    worker: bye')",
            "out of blocks",
        ),
        ("print('2026-11-25T12:00:01.123Z INFO    worker: all is well')", ""),
        ("pass", ""),
    ],
)
def test_the_last_error_is_the_line_that_tells_it(code: str, error: str) -> None:
    child, _ = run(code)
    assert child.last_error.endswith(error)
    assert bool(child.last_error) == bool(error)


def test_a_crash_is_told_by_its_first_line_not_by_the_stack_below() -> None:
    child, status = run("import faulthandler, os; faulthandler.enable(); os.abort()")
    assert status == -signal.SIGABRT
    assert child.last_error == "Fatal Python error: Aborted"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exit code 0"),
        (78, "exit code 78"),
        (-signal.SIGSEGV, "signal SIGSEGV"),
        (-signal.SIGKILL, "out of memory"),
        (-signal.SIGRTMIN - 3, f"signal {signal.SIGRTMIN + 3}"),
    ],
)
def test_an_exit_in_words(status: int, words: str) -> None:
    assert words in describe_exit(status)


def test_a_python_without_pidfd_open_has_sentinels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    _, status = run("import sys; sys.exit(5)")
    assert status == 5


def test_no_descriptor_is_left_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    run("pass")
    with pytest.raises(FileNotFoundError):
        Child(ChildSpec("demo", ["/no/such/program"]), epoch=0)
    assert set(os.listdir("/proc/self/fd")) == before


def test_only_the_status_pipe_is_inherited() -> None:
    """A descriptor that leaks into a child keeps sockets and pipes of the supervisor alive after it."""
    code = (
        "import os\n"
        "def is_open(d):\n"
        "    try: return bool(os.fstat(d))\n"
        "    except OSError: return False  # the one that listed them\n"
        "print([d for d in map(int, os.listdir('/proc/self/fd')) if is_open(d)], os.environ['TOKENYARD_STATUS_FD'])"
    )
    child = Child(ChildSpec("demo", [sys.executable, "-c", code]), epoch=0)
    select.select([child.sentinel], [], [], 20)
    child.reap()
    lines = child.read_output() or []
    child.close()
    descriptors, _, status = lines[0].rpartition(" ")
    numbers = [int(number) for number in descriptors.strip("[]").split(", ")]
    assert sorted(numbers) == [0, 1, 2, int(status)]
