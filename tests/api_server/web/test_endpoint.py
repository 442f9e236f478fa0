"""What holds for every endpoint: bodies, ids, errors of ours, and clients that go away."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from api_server.body.depth import DEEPEST
from api_server.dialects.openai import rendering
from api_server.web import read_body, sse
from tests.api_server.conftest import LiveServer, raw_post
from tests.api_server.scheduler_double import SchedulerDouble

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}


def endless(double: SchedulerDouble) -> None:
    double.answer = lambda _: [40]
    double.step_seconds = 0.01


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_before", [0, 3])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 200, "n": 2})],
)
def test_a_client_that_leaves_cancels_within_a_step(
    live: LiveServer,
    stream: bool,
    tokens_before: int,
    path: str,
    body: dict[str, object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    double = live.double
    endless(double)
    if not tokens_before:
        double.hold.set()
    connection = raw_post(live.url, path, body | {"stream": stream})
    expected = 1 if path == "/v1/chat/completions" else 4
    double.wait(lambda: len(double.running) == expected)
    double.wait(lambda: all(running.done >= tokens_before for running in double.running.values()))
    with caplog.at_level(logging.INFO):
        connection.close()
        double.wait(lambda: not double.running)
        double.wait(lambda: any("client went away" in record.getMessage() for record in caplog.records))
    assert sorted(double.cancelled) == sorted(submit.handle for submit in double.submits)
    assert live.state.engine.running == 0


def test_a_client_that_half_sends_its_body_and_leaves_does_no_harm(live: LiveServer) -> None:
    target = urlsplit(live.url)
    with socket.create_connection((target.hostname, target.port or 0)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert httpx.get(f"{live.url}/health").status_code == 200
    assert not live.double.submits


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"x"', b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 5000, b'{"seed": NaN}'],
)
def test_a_body_that_is_no_json_object_is_400(live: LiveServer, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        response = httpx.post(live.url + path, content=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/generate", "/v1/messages", "/vertex", "/invocations", "/tokenize", "/"]
)
def test_a_body_that_is_nested_too_deeply_is_400(live: LiveServer, path: str) -> None:
    levels = DEEPEST
    for depth, open_, close in ((levels + 1, "[", "]"), (1000, "[", "]"), (levels + 1, '{"a":', "}")):
        inner = open_ * (depth - 1) + "1" + close * (depth - 1)
        body = f'{{"model": "tiny-chat", "instances": {inner}}}'
        answer = httpx.post(live.url + path, content=body)
        assert answer.status_code in (400, 422), answer.text
        assert f"deeper than {levels} levels" in answer.text
    allowed = "[" * (levels - 1) + "]" * (levels - 1)
    answer = httpx.post(live.url + path, content=f'{{"model": "tiny-chat", "unheard_of": {allowed}, "text": "[{{"}}')
    assert "levels" not in answer.text
    assert answer.status_code < 500


def test_a_body_over_the_limit_is_413(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_body, "MAX_BODY_BYTES", 1000)
    response = httpx.post(f"{live.url}/v1/completions", content=b" " * 5000)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert httpx.post(f"{live.url}/v1/completions", json={"prompt": "x" * 100}).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/responses", "/generate", "/v1/messages", "/vertex", "/tokenize", "/v1/score"]
)
@pytest.mark.parametrize("coding", ["gzip", "br", "gzip, identity", "x" * 500])
def test_a_body_that_is_coded_is_415_with_the_reason(live: LiveServer, path: str, coding: str) -> None:
    body = gzip.compress(json.dumps({"prompt": "x", "model": "tiny-chat"}).encode())
    answer = httpx.post(live.url + path, content=body, headers={"content-encoding": coding})
    assert answer.status_code == 415
    assert "Content-Encoding" in answer.text
    assert coding[:100] in answer.text
    assert len(answer.text) < 500


def test_a_body_that_is_coded_as_it_is(live: LiveServer) -> None:
    headers = {"content-encoding": "Identity"}
    assert httpx.post(f"{live.url}/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200


def test_request_ids_go_in_and_out(live: LiveServer) -> None:
    def answered(**headers: str) -> str:
        response = httpx.post(f"{live.url}/v1/completions", json={"prompt": "x"}, headers=headers)
        return response.headers["x-request-id"]

    assert answered(**{"x-request-id": "mine-1"}) == "mine-1"
    assert live.double.submits[-1].context.request_id == "mine-1"
    fresh = answered()
    assert fresh != answered()
    assert live.double.submits[-2].context.request_id == fresh
    assert answered(**{"x-request-id": "x" * 500}) != "x" * 500
    assert httpx.get(f"{live.url}/nothing", headers={"x-request-id": "a"}).headers["x-request-id"] == "a"


def test_unknown_paths_and_methods(live: LiveServer) -> None:
    missing = httpx.get(f"{live.url}/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = httpx.get(f"{live.url}/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "POST" in wrong.headers["allow"]


def broken(*_: object, **__: object) -> object:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_is_logged_with_the_request_id_and_answered(
    live: LiveServer, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    endless(live.double)
    monkeypatch.setattr(rendering, "usage", broken)
    body = {"prompt": "x", "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    response = httpx.post(f"{live.url}/v1/completions", json=body, headers={"x-request-id": "bug-1"})
    if stream:
        error = json.loads(response.text.split("\n\n")[0].removeprefix("data: "))["error"]
    else:
        assert response.status_code == 500
        error = response.json()["error"]
    assert error["code"] == "internal_error"
    assert "bug-1" in error["message"]
    assert "ZeroDivisionError" not in response.text
    record = next(r for r in caplog.records if r.exc_info and r.exc_info[0] is ZeroDivisionError)
    assert "bug-1" in record.getMessage()
    live.double.wait(lambda: not live.double.running)


def test_health_and_ready_follow_the_engine(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def status(path: str) -> int:
        return httpx.get(live.url + path).status_code

    double = live.double
    assert (status("/health"), status("/ready"), status("/")) == (200, 200, 200)
    double.ready = False
    double.wait(lambda: status("/ready") == 503)
    assert httpx.get(f"{live.url}/ready").json() == {"ready": False, "reason": "loading weights"}
    assert status("/health") == 200  # a worker that is being restarted is no reason to kill the server
    monkeypatch.setattr("api_server.engine.client.STALE_SECONDS", 0.3)
    double.silent.set()
    double.wait(lambda: status("/health") == 503)
    unhealthy = httpx.get(f"{live.url}/health").json()
    assert (unhealthy["error"], unhealthy["error_type"]) == ("unhealthy", "healthcheck")
    assert "silent" in unhealthy["reason"]
    assert httpx.post(f"{live.url}/v1/completions", json={"prompt": "x"}).status_code == 503


def test_a_stream_that_is_silent_is_kept_alive(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.1)
    monkeypatch.setattr("api_server.generation.generation.SILENCE_BEFORE_HEADERS", 0.1)
    live.double.hold.set()
    seen = 0
    with httpx.stream("POST", f"{live.url}/v1/completions", json={"prompt": "x", "stream": True}) as response:
        for line in response.iter_lines():
            seen += line == ":"
            if seen == 3:
                live.double.hold.clear()
    assert seen >= 3
    assert line == ""


async def test_a_slow_reader_holds_nobody_up(live: LiveServer) -> None:
    live.double.max_model_len = 10**6
    await asyncio.to_thread(live.double.wait, lambda: live.state.max_model_len == 10**6)
    live.double.answer = lambda _: [40]
    slow = raw_post(live.url, "/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 100_000})
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    async with httpx.AsyncClient() as client:
        for _ in range(5):
            answer = await client.post(f"{live.url}/v1/completions", json={"prompt": "x", "max_tokens": 20})
            assert answer.json()["usage"]["completion_tokens"] == 20
    slow.close()
    await asyncio.to_thread(live.double.wait, lambda: not live.double.running)


async def test_many_clients_at_once(live: LiveServer) -> None:
    async with httpx.AsyncClient(timeout=90) as client:

        async def one(i: int) -> None:
            stream = bool(i % 2)
            body = {"prompt": f"request {i}", "stream": stream, "max_tokens": 50}
            response = await client.post(f"{live.url}/v1/completions", json=body)
            assert response.status_code == 200
            assert not stream or response.text.endswith("data: [DONE]\n\n")

        await asyncio.gather(*(one(i) for i in range(60)))
    assert live.state.engine.running == 0
