"""HAProxy with the shipped file: streams, refusals, and a rolling restart that loses no request."""

from __future__ import annotations

import csv
import io
import json
import re
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.components import asking
from tests.components.program import Program, find, needs
from tests.system.server import Server, free_port

SHIPPED = Path(__file__).parents[2] / "deploy" / "haproxy" / "haproxy.cfg"
DESCRIPTORS = int(2.1 * int(re.findall(r"^ +maxconn (\d+)", SHIPPED.read_text(), re.MULTILINE)[0]))
pytestmark = [
    needs("haproxy"),
    pytest.mark.skipif(
        0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < DESCRIPTORS,
        reason=f"HAProxy does not start with maxconn of haproxy.cfg where `ulimit -Hn` is below {DESCRIPTORS}",
    ),
]


@dataclass
class Proxy(Program):
    """HAProxy with the shipped file, where only ports are others."""

    statistics: int = 0
    """The port of its statistics."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def states(self) -> dict[str, str]:
        """UP, DOWN, ... of each server."""
        text = httpx.get(f"http://127.0.0.1:{self.statistics}/;csv").text.removeprefix("# ")
        rows = csv.DictReader(io.StringIO(text))
        return {row["svname"]: row["status"] for row in rows if row["pxname"] == "servers"}

    def wait_until(self, name: str, state: str) -> None:
        deadline = time.monotonic() + 60
        while self.states()[name].split()[0] != state:
            assert time.monotonic() < deadline, f"{name} is not {state}: {self.states()}"
            time.sleep(0.1)


def haproxy(first: int, second: int, directory: Path) -> Proxy:
    port, statistics = free_port(), free_port()
    configuration = SHIPPED.read_text()
    for ours, theirs in (
        ("bind :8080", f"bind 127.0.0.1:{port}"),
        ("127.0.0.1:8404", f"127.0.0.1:{statistics}"),
        ("127.0.0.1:8000", f"127.0.0.1:{first}"),
        ("127.0.0.1:8001", f"127.0.0.1:{second}"),
    ):
        assert ours in configuration
        configuration = configuration.replace(ours, theirs)
    file = directory / "haproxy.cfg"
    file.write_text(configuration)
    return Proxy(["haproxy", "-f", str(file)], port, directory, statistics=statistics)


@pytest.fixture(scope="module")
def proxy(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """In front of one server, which is both of the file."""
    with haproxy(server.port, server.port, tmp_path_factory.mktemp("haproxy")) as running:
        yield running


def test_the_shipped_file_is_valid() -> None:
    checked = subprocess.run([find("haproxy") or "", "-c", "-f", SHIPPED], capture_output=True, text=True, timeout=90)
    assert checked.returncode == 0, checked.stderr
    assert "WARNING" not in checked.stderr


def test_requests_and_streams_pass(proxy: Proxy, server: Server) -> None:
    chat = asking.long_chat() | {"temperature": 0}
    passed, direct = (
        httpx.post(url + "/v1/chat/completions", json=chat, timeout=asking.SECONDS) for url in (proxy.url, server.url)
    )
    assert passed.status_code == 200, passed.text
    assert passed.json()["choices"] == direct.json()["choices"]
    asking.assert_streams_token_by_token(proxy.url)


def test_operators_routes_are_closed(proxy: Proxy) -> None:
    asking.assert_operators_routes_are_closed(proxy.url)


def test_a_request_in_two_pieces_is_sent_again(server: Server, busy: int, tmp_path: Path) -> None:
    """Clients send head and body one after the other. One of the two servers answers 503 to all but `/ready`."""
    body = json.dumps(asking.completion(1)).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", "Connection: close"]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode()
    statuses = []
    with haproxy(busy, server.port, tmp_path) as proxy:
        for _ in range(4):
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=asking.SECONDS) as client:
                client.sendall(head)
                # Long enough for HAProxy to send the head to a server, if it does not wait for the body.
                time.sleep(0.1)
                client.sendall(body)
                statuses.append(client.makefile("rb").readline().split()[1])
    assert statuses == [b"200"] * 4


@dataclass
class Crowd:
    """Clients with kept connections, with small bodies, bodies beyond 16 KB, and streams, until they are stopped."""

    url: str
    answers: int = 0
    lost: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def ask(self, nth: int) -> None:
        body = asking.completion(2)
        if nth % 3 == 0:
            body["user"] = asking.PADDING
        elif nth % 3 == 1:
            body |= {"stream": True, "max_tokens": 60}
        with httpx.Client(timeout=asking.SECONDS) as client:
            while not self.stopped.wait(0.1):
                try:
                    answer = client.post(self.url + "/v1/completions", json=body)
                except httpx.HTTPError as error:
                    self.lost.append(f"client {nth}: {error!r}")
                    continue
                whole = answer.status_code == 200 and (not body.get("stream") or answer.text.endswith("[DONE]\n\n"))
                if whole:
                    self.answers += 1
                else:
                    self.lost.append(f"client {nth}: {answer.status_code} {answer.text[-200:]}")


def test_a_rolling_restart_loses_no_request(tmp_path: Path) -> None:
    """With the settings that a server has by default. One that no client has asked since its SIGTERM ends at once, and
    HAProxy's checks may notice that later: it repeats requests that no server has accepted."""
    servers = {name: Server(None, [], tmp_path / f"{name}.log") for name in ("yard1", "yard2")}
    with ThreadPoolExecutor(8) as threads:
        try:
            list(threads.map(Server.__enter__, servers.values()))
            with haproxy(servers["yard1"].port, servers["yard2"].port, tmp_path) as proxy:
                crowd = Crowd(proxy.url)
                clients = [threads.submit(crowd.ask, nth) for nth in range(6)]
                try:
                    for name, server in servers.items():
                        proxy.wait_until(name, "UP")
                        before = crowd.answers
                        server.__exit__()
                        assert server.process.returncode == 0, server.log.read_text()
                        server.__enter__()
                        proxy.wait_until(name, "UP")
                        assert crowd.answers > before
                finally:
                    crowd.stopped.set()
                for client in clients:
                    client.result()
        finally:
            list(threads.map(Server.__exit__, servers.values()))
    assert not crowd.lost, crowd.lost[:10]
    assert crowd.answers > 50
