"""Paths that this server has not: the error names the one that was meant, in the form of that dialect."""

from __future__ import annotations

import httpx
import pytest

from api_server.http.paths import above, meant
from tests.api_server.conftest import LiveServer
from tests.api_server.http.conftest import Line, request

KNOWN = {"/v1/chat/completions", "/v1/models", "/generate", "/health"}


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("//v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/chat/completions//", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/api/v1/models", "/v1/models"),
        ("/v1/generate", "/generate"),
        ("/v1/health/", "/health"),
        ("/v1/engines", None),
        ("/", None),
        ("//", None),
        ("", None),
        ("/v1/models" * 40, None),
        ("/a" * 100 + "/generate", None),
    ],
)
def test_what_was_meant(path: str, wanted: str | None) -> None:
    assert meant(path, KNOWN.__contains__) == wanted


def test_paths_above() -> None:
    assert list(above("/v1/messages/batches/7")) == ["/v1/messages/batches", "/v1/messages", "/v1"]
    assert list(above("/v1")) == []


SLIPS = {
    "//v1/chat/completions": "/v1/chat/completions",
    "/v1/v1/completions": "/v1/completions",
    "/v1/models/": "/v1/models",
    "/v1/messages/": "/v1/messages",
    "//v1/messages/count_tokens": "/v1/messages/count_tokens",
    "/messages": "/v1/messages",
    "/generate/": "/generate",
    "/v1/generate_stream": "/generate_stream",
    "/v1/health": "/health",
}


@pytest.mark.parametrize("path", SLIPS)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_error_names_the_path(server: LiveServer, path: str, method: str) -> None:
    answer = httpx.request(method, server.url + path)
    assert answer.status_code == 404
    assert f"did you mean {SLIPS[path]}?" in answer.text


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        ("/v1/nothing", {"error": {"message", "type", "param", "code"}}),
        ("/v1/messages/batches", {"type": None, "error": {"type", "message"}, "request_id": None}),
        ("/v1/messages/batches/7/results", {"type": None, "error": {"type", "message"}, "request_id": None}),
        ("//v1/messages", {"type": None, "error": {"type", "message"}, "request_id": None}),
        ("/info/", {"error": None, "error_type": None}),
        ("/server_info/", {"error": {"message", "type", "code"}}),
    ],
)
def test_the_error_has_the_form_of_the_dialect(server: LiveServer, path: str, keys: dict[str, set[str] | None]) -> None:
    found = httpx.get(server.url + path).json()
    assert set(found) == set(keys)
    for key, inner in keys.items():
        assert inner is None or set(found[key]) == inner


def test_a_long_path_is_answered_at_once(line: Line) -> None:
    line.send(request("/" + "v1/" * 20_000, method="GET"), request("/" + "v1/" * 25_000, method="GET"))
    answer = line.answer()
    assert answer.status == 404
    assert len(answer.body) < 3000
    assert line.answer().status == 414
    assert line.ended


def test_a_refusal_can_be_read_although_the_body_still_comes(server: LiveServer) -> None:
    line = Line(server)
    head = request("/v1/nothing", b"", "Connection: close", "Content-Length: 3000000", framed=False)
    line.send(head, *[b"x" * 100_000] * 30, pause=0.002)
    assert line.answer().status == 404
    line.close()
