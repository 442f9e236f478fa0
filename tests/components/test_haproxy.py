"""HAProxy with each shipped file: streams, refusals, sessions, a lost server, and restarts that lose no request."""

from __future__ import annotations

import csv
import io
import json
import re
import resource
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.components import asking
from tests.components.pair import Pair, assert_a_restart_loses_nothing, assert_streams_outlive_a_server
from tests.components.program import Program, find, needs
from tests.components.stand_in import StandIn, standing_in
from tests.system.server import Server, free_port

FOLDER = Path(__file__).parents[2] / "deploy" / "haproxy"
SHIPPED = FOLDER / "haproxy.cfg"
SESSIONS = FOLDER / "haproxy-sessions.cfg"
BOTH = pytest.mark.parametrize("shipped", [SHIPPED, SESSIONS], ids=["leastconn", "sessions"])
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
    """HAProxy with a shipped file, where only ports are others."""

    statistics: int = 0
    """The port of its statistics."""

    def is_ready(self) -> bool:
        """HAProxy opens one port after the other."""
        socket.create_connection(("127.0.0.1", self.statistics), timeout=1).close()
        return super().is_ready()

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


def haproxy(first: int, second: int, directory: Path, shipped: Path = SHIPPED) -> Proxy:
    port, statistics = free_port(), free_port()
    configuration = shipped.read_text()
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


@BOTH
def test_the_shipped_file_is_valid(shipped: Path) -> None:
    checked = subprocess.run([find("haproxy") or "", "-c", "-f", shipped], capture_output=True, text=True, timeout=90)
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


@BOTH
def test_a_request_in_two_pieces_is_sent_again(shipped: Path, server: Server, busy: int, tmp_path: Path) -> None:
    """Clients send head and body one after the other. One of the two servers answers 503 to all but `/ready`."""
    body = json.dumps(asking.completion(1)).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", "Connection: close"]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode()
    statuses = []
    with haproxy(busy, server.port, tmp_path, shipped) as proxy:
        for _ in range(4):
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=asking.SECONDS) as client:
                client.sendall(head)
                # Long enough for HAProxy to send the head to a server, if it does not wait for the body.
                time.sleep(0.1)
                client.sendall(body)
                statuses.append(client.makefile("rb").readline().split()[1])
    assert statuses == [b"200"] * 4


@BOTH
def test_refusals_of_all_servers_reach_the_client(shipped: Path, busy: int, full: int, tmp_path: Path) -> None:
    for number, (port, status, seconds) in enumerate(((busy, 503, None), (full, 429, "7"))):
        directory = tmp_path / str(number)
        directory.mkdir()
        with haproxy(port, port, directory, shipped) as proxy:
            answers = [httpx.post(proxy.url + "/generate", json={"text": "x"}) for _ in range(8)]
        assert {(answer.status_code, answer.headers.get("retry-after")) for answer in answers} == {(status, seconds)}


@BOTH
def test_streams_outlive_a_server(shipped: Path, pair: Pair, tmp_path: Path) -> None:
    with haproxy(*pair.ports, tmp_path, shipped) as proxy:
        assert_streams_outlive_a_server(proxy.url, pair, "yard1", shipped.stem)
        proxy.wait_until("yard1", "DOWN")
        pair.start()
        proxy.wait_until("yard1", "UP")


@BOTH
def test_a_restart_loses_no_request(shipped: Path, pair: Pair, tmp_path: Path) -> None:
    """One that no client has asked since its SIGTERM ends at once, and HAProxy's checks may notice that later: it
    repeats requests that no server has accepted."""
    with haproxy(*pair.ports, tmp_path, shipped) as proxy:
        assert_a_restart_loses_nothing(proxy.url, pair, "yard2", lambda: proxy.wait_until("yard2", "UP"))


@pytest.fixture
def noting(tmp_path: Path) -> Iterator[tuple[Proxy, StandIn, StandIn]]:
    """HAProxy with sessions, and two servers that note which come."""
    with (
        standing_in(200) as first,
        standing_in(200) as second,
        haproxy(first.port, second.port, tmp_path, SESSIONS) as proxy,
    ):
        yield proxy, first, second


def test_a_session_stays_at_one_server(noting: tuple[Proxy, StandIn, StandIn]) -> None:
    """One connection, so that HAProxy has ended a request before it reads the next: by its bounded load a server that
    still has one open gets no second one."""
    proxy, first, second = noting
    sessions = [f"session {number}" for number in range(10)]
    with httpx.Client() as client:
        for session in sessions * 4:
            client.post(proxy.url, json={}, headers={"x-session-id": session})
        assert {*Counter(first.seen).values(), *Counter(second.seen).values()} == {4}
        homes = {session: [session in first.seen, session in second.seen] for session in sessions}
        for session in sessions:
            client.post(proxy.url, json={"prompt": asking.PADDING, "prompt_cache_key": session})
    for stand_in, place in ((first, 0), (second, 1)):
        bodies = [json.loads(text) for text in stand_in.seen if text.startswith("{")]
        assert [homes[body["prompt_cache_key"]][place] for body in bodies] == [True] * len(bodies)
    assert len(first.seen) + len(second.seen) == 50


def test_requests_without_a_session_go_to_all_servers(noting: tuple[Proxy, StandIn, StandIn]) -> None:
    """One in 2^40 draws would leave a server without any."""
    proxy, first, second = noting
    for _ in range(41):
        httpx.post(proxy.url, json={"prompt": "x"})
    assert first.seen
    assert second.seen


def test_a_session_with_too_much_to_do_spills_over(noting: tuple[Proxy, StandIn, StandIn]) -> None:
    """With 16 open requests a server has at most half of 1.5 times as many."""
    proxy, first, second = noting
    for stand_in in (first, second):
        stand_in.released.clear()
    with ThreadPoolExecutor(16) as threads:
        try:
            headers = {"x-session-id": "one"}
            asked = [threads.submit(httpx.post, proxy.url, json={}, headers=headers) for _ in range(16)]
            deadline = time.monotonic() + 30
            while len(first.seen) + len(second.seen) < 16:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            for stand_in in (first, second):
                stand_in.released.set()
        assert [each.result().status_code for each in asked] == [200] * 16
    assert max(len(first.seen), len(second.seen)) <= 12
