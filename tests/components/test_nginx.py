"""nginx in front of a server: with the plainest file there is, and with the one that is shipped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.components import asking
from tests.components.pair import Pair, assert_a_restart_loses_nothing, assert_streams_outlive_a_server
from tests.components.program import Program, needs
from tests.system.server import Server, free_port

pytestmark = needs("nginx")

SHIPPED = Path(__file__).parents[2] / "deploy" / "nginx" / "nginx.conf"
PLAINEST = "events {} http { server { listen 8080; location / { proxy_pass http://127.0.0.1:8000; } } }"


def nginx(configuration: str, first: int, second: int, directory: Path) -> Program:
    """The configuration with other ports, and with its files in the directory instead of the system's."""
    port = free_port()
    places = "".join(f"{kind}_temp_path {directory}/{kind}; " for kind in ("client_body", "proxy"))
    places += "".join(f"{kind}_temp_path {directory}/{kind}; " for kind in ("fastcgi", "uwsgi", "scgi"))
    for ours, theirs in (
        ("listen 8080;", f"listen 127.0.0.1:{port};"),
        ("127.0.0.1:8000", f"127.0.0.1:{first}"),
        ("127.0.0.1:8001", f"127.0.0.1:{second}"),
        ("http {", f"http {{ {places}"),
    ):
        configuration = configuration.replace(ours, theirs)
    file = directory / "nginx.conf"
    file.write_text(configuration)
    settings = f"daemon off; pid {directory}/pid; error_log stderr;" + (" user root;" if os.geteuid() == 0 else "")
    return Program(["nginx", "-p", str(directory), "-c", str(file), "-g", settings], port, directory)


@pytest.fixture(scope="module", params=[PLAINEST, SHIPPED.read_text()], ids=["plainest", "shipped"])
def url(server: Server, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with nginx(request.param, server.port, server.port, tmp_path_factory.mktemp("nginx")) as running:
        yield f"http://127.0.0.1:{running.port}"


def test_streams_arrive_token_by_token(url: str) -> None:
    asking.assert_streams_token_by_token(url)


def test_a_long_chat_is_the_same_as_without_nginx(url: str, server: Server) -> None:
    chat = asking.long_chat() | {"temperature": 0}
    passed, direct = (
        httpx.post(at + "/v1/chat/completions", json=chat, timeout=asking.SECONDS) for at in (url, server.url)
    )
    assert passed.status_code == 200, passed.text
    assert passed.json()["choices"] == direct.json()["choices"]


def test_operators_routes_are_closed(url: str) -> None:
    asking.assert_operators_routes_are_closed(url)


@pytest.mark.parametrize("url", [SHIPPED.read_text()], indirect=True, ids=["shipped"])
def test_large_bodies_pass_the_shipped_file(url: str) -> None:
    body = json.dumps(asking.completion(1)) + " " * 2_000_000
    answer = httpx.post(url + "/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text


def test_the_shipped_file_asks_another_server_when_one_is_busy_or_gone(
    server: Server, busy: int, tmp_path: Path
) -> None:
    for number, other in enumerate((busy, free_port())):
        directory = tmp_path / str(number)
        directory.mkdir()
        with nginx(SHIPPED.read_text(), other, server.port, directory) as running:
            url = f"http://127.0.0.1:{running.port}/v1/completions"
            answers = [httpx.post(url, json=asking.completion(1)).status_code for _ in range(6)]
        assert answers == [200] * 6


def test_refusals_of_all_servers_reach_the_client(busy: int, full: int, tmp_path: Path) -> None:
    """Clients come again; a 502 of nginx's own would hit those of other routes, too."""
    for number, (port, status, seconds) in enumerate(((busy, 503, None), (full, 429, "7"))):
        directory = tmp_path / str(number)
        directory.mkdir()
        with nginx(SHIPPED.read_text(), port, port, directory) as running:
            url = f"http://127.0.0.1:{running.port}/generate"
            answers = [httpx.post(url, json={"text": "x"}) for _ in range(8)]
        assert {(answer.status_code, answer.headers.get("retry-after")) for answer in answers} == {(status, seconds)}


def test_streams_outlive_a_server_and_a_restart_loses_no_request(pair: Pair, tmp_path: Path) -> None:
    with nginx(SHIPPED.read_text(), *pair.ports, tmp_path) as running:
        url = f"http://127.0.0.1:{running.port}"
        assert_streams_outlive_a_server(url, pair, "yard1", "nginx")
        pair.start()
        # nginx needs no check to ask a server again.
        assert_a_restart_loses_nothing(url, pair, "yard2", lambda: None)
