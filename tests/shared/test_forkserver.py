"""Children that a process forks on demand: they serve, they die alone, and they end with it and with the worker."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import psutil
import pytest

from shared.forkserver import ForkServer

ECHO = """
import os, socket
from shared.forkserver import serve_forks

def serve(descriptors):
    with socket.socket(fileno=descriptors[0]) as worker:
        worker.sendall(b"%d" % os.getpid())
        while data := worker.recv(99):
            if data == b"raise":
                raise ValueError("as asked")
            worker.sendall(data[::-1])

serve_forks(serve)
"""


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with closing(ForkServer(["-c", ECHO])) as made:
        yield made


def child_of(server: ForkServer) -> tuple[socket.socket, psutil.Process]:
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    with theirs:
        server.fork([theirs.fileno()])
    return ours, psutil.Process(int(ours.recv(99)))


def echo(worker: socket.socket) -> None:
    text = random.randbytes(9)
    worker.sendall(text)
    assert worker.recv(99) == text[::-1]


@pytest.mark.parametrize(("end", "code"), [("exit", 0), ("raise", 1), ("kill", -signal.SIGKILL)])
def test_another_child_follows_at_once(server: ForkServer, end: str, code: int) -> None:
    worker, first = child_of(server)
    parent = first.parent()
    with worker:
        echo(worker)
        if end == "exit":
            worker.shutdown(socket.SHUT_WR)
        elif end == "raise":
            worker.sendall(b"raise")
        else:
            first.kill()
        assert worker.recv(99) == b""
    assert server.exit_code(10) == code
    worker, second = child_of(server)
    with worker:
        echo(worker)
        assert second.pid != first.pid
        assert second.parent() == parent


def test_an_end_that_nobody_asked_for_is_not_taken_for_the_next_one(server: ForkServer) -> None:
    worker, first = child_of(server)
    first.kill()
    assert worker.recv(99) == b""
    worker.close()
    worker, _ = child_of(server)
    assert server.exit_code(0.1) == 0
    worker.sendall(b"raise")
    assert worker.recv(99) == b""
    assert server.exit_code(10) == 1
    worker.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_its_death_takes_the_child_along_and_is_made_good(server: ForkServer, number: signal.Signals) -> None:
    """A child that ends so was killed: it did nothing for which the process had to end."""
    worker, child = child_of(server)
    child.parent().send_signal(number)
    assert worker.recv(99) == b""
    worker.close()
    assert server.exit_code(10) == -signal.SIGKILL
    worker, _ = child_of(server)
    with worker:
        echo(worker)


def test_closing_ends_both(server: ForkServer) -> None:
    worker, child = child_of(server)
    parent = child.parent()
    assert parent.ppid() == os.getpid()
    server.close()
    assert worker.recv(99) == b""
    worker.close()
    wait_until(lambda: not child.is_running() and not parent.is_running())


def test_one_that_cannot_load_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with closing(ForkServer(["-c", "raise SystemExit('no tokens')"])) as server:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            server.fork([theirs.fileno()])
            theirs.close()
            ours.settimeout(30)
            assert ours.recv(99) == b""
            assert server.exit_code(10) == -signal.SIGKILL
    assert "no tokens" in capfd.readouterr().err


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
