"""The port: one server has it, from the first moment."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from deploy.listener import listen, port_problem
from shared.settings import SettingsError


def test_a_free_port_has_no_problem_and_a_taken_one_has() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert f"port {port} is taken" in (port_problem("127.0.0.1", port) or "")
        assert f"port {port} is taken" in (port_problem("0.0.0.0", port) or "")
    assert port_problem("127.0.0.1", port) is None


def test_a_port_with_connections_that_linger_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        port = server.getsockname()[1]
        accepted, _ = server.accept()
        accepted.close()
        assert client.recv(1) == b""
    assert port_problem("127.0.0.1", port) is None


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_a_foreign_host_is_explained(host: str) -> None:
    assert f"host '{host}' is no address of this machine" in (port_problem(host, 8123) or "")


def test_of_two_that_want_a_port_at_once_one_gets_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for _ in range(20):
        got, refused = _race(8, lambda: listen("127.0.0.1", port))
        assert len(got) == 1
        assert len(refused) == 7
        assert all(f"port {port} is taken by another process" in text for text in refused)
        got[0].close()


def test_nobody_can_join_a_port_that_is_held() -> None:
    with listen("127.0.0.1", 0) as held, socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with pytest.raises(OSError, match="in use"):
            stranger.bind(held.getsockname())


def _race(runners: int, attempt: Callable[[], socket.socket]) -> tuple[list[socket.socket], list[str]]:
    start, got, refused = threading.Barrier(runners), [], []

    def run() -> None:
        start.wait()
        try:
            got.append(attempt())
        except SettingsError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(runners)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got, refused
