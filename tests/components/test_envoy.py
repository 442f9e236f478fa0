"""Envoy with the shipped file: streams, sessions, refusals, a lost server, and a restart that loses no request."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.components import asking
from tests.components.pair import Pair, assert_a_restart_loses_nothing, assert_streams_outlive_a_server
from tests.components.program import Program, needs
from tests.components.stand_in import standing_in
from tests.system.server import Server, free_port

pytestmark = needs("envoy")

SHIPPED = Path(__file__).parents[2] / "deploy" / "envoy" / "envoy.yaml"


@dataclass
class Proxy(Program):
    """Envoy with the shipped file, where only ports are others."""

    admin: int = 0
    """The port of its administration."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def is_ready(self) -> bool:
        """Envoy asks each server once before it serves."""
        return super().is_ready() and httpx.get(f"http://127.0.0.1:{self.admin}/ready").status_code == 200

    def healthy(self) -> set[int]:
        """The ports of the servers that both kinds of requests go to."""
        clusters = httpx.get(f"http://127.0.0.1:{self.admin}/clusters?format=json").json()["cluster_statuses"]
        assert len(clusters) == 2
        found = [
            {
                host["address"]["socket_address"]["port_value"]
                for host in cluster["host_statuses"]
                if host["health_status"].keys() == {"eds_health_status"}
            }
            for cluster in clusters
        ]
        return found[0] & found[1]

    def wait_until_healthy(self, *ports: int) -> None:
        deadline = time.monotonic() + 60
        while self.healthy() != set(ports):
            assert time.monotonic() < deadline, f"{ports} are not those that are up: {self.healthy()}"
            time.sleep(0.1)


def envoy(first: int, second: int, directory: Path) -> Proxy:
    port, admin = free_port(), free_port()
    configuration = SHIPPED.read_text()
    for ours, theirs in (
        ("address: 0.0.0.0, port_value: 8080", f"address: 127.0.0.1, port_value: {port}"),
        ("port_value: 9901", f"port_value: {admin}"),
        ("port_value: 8000", f"port_value: {first}"),
        ("port_value: 8001", f"port_value: {second}"),
    ):
        assert configuration.count(ours) == 1
        configuration = configuration.replace(ours, theirs)
    file = directory / "envoy.yaml"
    file.write_text(configuration)
    # A name that no other one has for what Envoy shares with its successor, and one thread.
    more = ["--use-dynamic-base-id", "--concurrency", "1"]
    return Proxy(["envoy", "-c", str(file), *more], port, directory, admin=admin)


@pytest.fixture(scope="module")
def url(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with envoy(server.port, free_port(), tmp_path_factory.mktemp("envoy")) as running:
        running.wait_until_healthy(server.port)
        yield running.url


def test_streams_arrive_token_by_token(url: str) -> None:
    asking.assert_streams_token_by_token(url)


def test_operators_routes_are_closed(url: str) -> None:
    asking.assert_operators_routes_are_closed(url)


def test_large_bodies_pass(url: str) -> None:
    body = json.dumps(asking.completion(1)) + " " * 2_000_000
    answer = httpx.post(url + "/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text


def test_a_request_keeps_the_id_of_its_client(url: str) -> None:
    answer = httpx.post(url + "/v1/completions", json=asking.completion(1), headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("headers", [{}, {"x-session-id": "one"}], ids=["any", "session"])
def test_another_server_is_asked_when_one_is_busy(
    server: Server, busy: int, tmp_path: Path, headers: dict[str, str]
) -> None:
    with envoy(busy, server.port, tmp_path) as running:
        running.wait_until_healthy(busy, server.port)
        ask = httpx.Client(base_url=running.url, headers=headers)
        answers = [ask.post("/v1/completions", json=asking.completion(1)).status_code for _ in range(6)]
    assert answers == [200] * 6


def test_refusals_of_all_servers_reach_the_client(busy: int, full: int, tmp_path: Path) -> None:
    for number, (port, status, seconds) in enumerate(((busy, 503, None), (full, 429, "7"))):
        directory = tmp_path / str(number)
        directory.mkdir()
        with envoy(port, port, directory) as running:
            answers = [httpx.post(running.url + "/generate", json={"text": "x"}) for _ in range(8)]
        assert {(answer.status_code, answer.headers.get("retry-after")) for answer in answers} == {(status, seconds)}


def test_requests_of_one_session_go_to_one_server(tmp_path: Path) -> None:
    servers: dict[str, set[str]] = {}
    with (
        standing_in(429, retry_after="1") as first,
        standing_in(429, retry_after="2") as second,
        envoy(first.port, second.port, tmp_path) as running,
    ):
        running.wait_until_healthy(first.port, second.port)
        for session in [*map(str, range(12))] * 3:
            headers = {"x-session-id": session}
            answer = httpx.post(running.url + "/generate", json={"text": "x"}, headers=headers)
            servers.setdefault(session, set()).add(answer.headers["retry-after"])
    assert all(len(each) == 1 for each in servers.values()), servers
    assert {next(iter(each)) for each in servers.values()} == {"1", "2"}, "both have some"


def test_streams_outlive_a_server_and_a_restart_loses_no_request(pair: Pair, tmp_path: Path) -> None:
    with envoy(*pair.ports, tmp_path) as running:
        running.wait_until_healthy(*pair.ports)
        assert_streams_outlive_a_server(running.url, pair, "yard1", "envoy")
        pair.start()
        up = lambda: running.wait_until_healthy(*pair.ports)  # noqa: E731
        assert_a_restart_loses_nothing(running.url, pair, "yard2", up)
