"""Facts about the machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from deploy import machine


def test_a_free_port_has_no_problem_and_a_taken_one_has() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert f"port {port} is taken" in (machine.port_problem("127.0.0.1", port) or "")
        assert f"port {port} is taken" in (machine.port_problem("0.0.0.0", port) or "")
    assert machine.port_problem("127.0.0.1", port) is None


def test_a_port_with_connections_that_linger_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        port = server.getsockname()[1]
        accepted, _ = server.accept()
        accepted.close()
        assert client.recv(1) == b""
    assert machine.port_problem("127.0.0.1", port) is None


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_a_foreign_host_is_explained(host: str) -> None:
    assert f"host '{host}' is no address of this machine" in (machine.port_problem(host, 8123) or "")


@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,1,2", 2), ("0,-1,1", 1), ("GPU-8c1f,GPU-77aa", 2)]
)
def test_visible_devices_are_counted_as_cuda_does(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "torch_version", lambda: "2.13.0")
    monkeypatch.setattr(machine, "_gpus_installed", lambda: 2)
    devices = machine.cuda_devices({"CUDA_VISIBLE_DEVICES": visible})
    assert devices == [f"cuda:{index}" for index in range(count)]


def test_features_are_those_of_this_machine() -> None:
    assert machine.cpu_features()


def test_writable_folders_are_made(tmp_path: Path) -> None:
    assert machine.is_writable(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    assert not machine.is_writable(tmp_path / "file" / "b")
