"""What bodies may weigh, one and all together, and that large ones are read like small ones, only elsewhere."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from api_server.body import bodies
from api_server.body.bodies import Bodies
from api_server.dialects.openai import requests
from api_server.errors import ErrorKind, RequestFailed
from tests.api_server.conftest import LiveServer

PATHS = [
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/generate", "/generate_stream", "/", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/score", "/invocations",
    "/vertex", "/chat_tokenize", "/parse_function_call", "/open_session",
]  # fmt: skip


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the real ones, a thousandth of them."""
    monkeypatch.setattr(bodies, "MOST_WEIGHT", 200_000)
    monkeypatch.setattr(bodies, "MOST_HELD", 800_000)
    monkeypatch.setattr(bodies, "KEPT_FOR_SMALL", 200_000)
    monkeypatch.setattr(bodies, "SMALL", 500)


def parsed_nothing(body: bytes) -> None:
    assert not body
    raise RequestFailed(ErrorKind.BAD_JSON, "nothing is no JSON")


@pytest.mark.parametrize("item", ["1", '{"a":1}', "[]", '"x"', '{"role":"user","content":"x"}'])
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(
    live: LiveServer, small_limits: None, item: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f'{{"model":"tiny-chat","max_tokens":1,"messages":[{",".join([item] * 4000)}]}}'
    monkeypatch.setattr("api_server.web.endpoint.orjson.loads", parsed_nothing)
    for path in PATHS:
        answer = httpx.post(live.url + path, content=body)
        assert answer.status_code in (400, 422), (path, answer.text)
        for words in ("values", f"in {len(body)} bytes", "possible; send fewer"):
            assert words in answer.text
        live.double.wait(lambda: live.state.bodies.held == 0)


def test_texts_may_be_full_of_commas_and_brackets(live: LiveServer, small_limits: None) -> None:
    body = {"prompt": "x", "user": '[{"a":1},' * 3000}
    assert len(json.dumps(body)) < bodies.MOST_WEIGHT
    assert httpx.post(f"{live.url}/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"model": "tiny-chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 4}}),
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 4, "details": True}}),
        ("/vertex", {"instances": [{"inputs": "a"}, {"messages": [{"role": "user", "content": "hi"}]}]}),
        ("/v1/tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/detokenize", {"tokens": [[1, 2], [3]]}),
        ("/v1/score", {"query": "a", "items": ["b", "c"], "label_token_ids": [1, 2]}),
        ("/chat_tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/abort_request", {"rid": "nobody"}),
        ("/v1/completions", {"prompt": 5}),
        ("/generate", {"text": 5}),
        ("/generate", {"inputs": 5}),
    ],
)
def test_a_large_body_is_answered_as_a_small_one(
    live: LiveServer, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    terms: list[dict[str, Any]] = [{}, {"priority": 0, "timeout": 50}, {"timeout": -1}]

    def answered(terms: dict[str, Any]) -> tuple[int, Any]:
        response = httpx.post(live.url + path, json=body | terms, headers={"x-request-id": "a"})
        return response.status_code, _without_times(response.json() if response.content else None)

    small = [answered(each) for each in terms]
    threads = []
    monkeypatch.setattr(bodies, "LIGHT", 0)
    apart = Bodies.apart

    async def watched(self: Bodies, job: Any) -> Any:
        def noted() -> Any:
            threads.append(threading.current_thread().name)
            return job()

        return await apart(self, noted)

    monkeypatch.setattr(Bodies, "apart", watched)
    assert [answered(each) for each in terms] == small
    assert threads
    assert all(name.startswith("bodies") for name in threads)


def _without_times(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_times(each) for each in value]
    if not isinstance(value, dict):
        return value
    changing = ("id", "created", "created_at", "completed_at", "e2e_latency", "request_id")
    return {name: _without_times(each) for name, each in value.items() if name not in changing}


def test_only_so_much_is_held_at_once_and_small_bodies_still_get_in(live: LiveServer, small_limits: None) -> None:
    live.double.hold.set()
    large = {"prompt": "x", "user": "u" * 60_000, "max_tokens": 5}
    with contextlib.ExitStack() as cleanup:
        for i in range(13):
            connection = cleanup.enter_context(opened(live, large))
            live.double.wait(partial(runs, live, i + 1))
        assert live.state.bodies.held > 13 * 60_000
        refused = httpx.post(f"{live.url}/v1/completions", json=large)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "hold as much memory as they may" in refused.text
        assert httpx.post(f"{live.url}/generate", json=large | {"text": "x"}).status_code == 503
        # A body that is not complete yet counts, too, and one that is refused is given back.
        before = live.state.bodies.held
        half = cleanup.enter_context(opened(live, {"prompt": "x", "user": "u" * 200}, part=150))
        live.double.wait(lambda: live.state.bodies.held > before)
        half.close()
        live.double.wait(lambda: live.state.bodies.held == before)
        small = opened(live, {"prompt": "x", "max_tokens": 5})
        cleanup.enter_context(small)
        live.double.wait(lambda: len(live.double.running) == 14)
        live.double.hold.clear()
        assert b"200 OK" in small.recv(1000)
        assert b"200 OK" in connection.recv(1000)
    live.double.wait(lambda: live.state.bodies.held == 0)
    assert httpx.post(f"{live.url}/v1/completions", json=large).status_code == 200


def runs(live: LiveServer, count: int) -> bool:
    return len(live.double.running) == count


def opened(live: LiveServer, body: dict[str, Any], part: int | None = None) -> socket.socket:
    """A connection on which a request was sent, or a part of it."""
    target = urlsplit(live.url)
    connection = socket.create_connection((target.hostname, target.port or 0), timeout=90)
    data = json.dumps(body).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data[:part]
    )
    return connection


def test_bodies_are_given_back_whatever_happens(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> object:
        raise ZeroDivisionError

    assert httpx.post(f"{live.url}/v1/completions", content=b"{").status_code == 400
    monkeypatch.setattr(requests, "read", broken)
    assert httpx.post(f"{live.url}/v1/completions", json={"prompt": "x"}).status_code == 500
    live.double.wait(lambda: live.state.bodies.held == 0)


def test_a_body_that_is_no_json_is_parsed_once_and_not_kept(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from api_server.web import endpoint

    parsed: list[int] = []
    calls: list[endpoint.Call] = []
    original = endpoint.Call._parse

    def counted(call: endpoint.Call) -> dict[str, Any]:
        parsed.append(len(call.body))
        calls.append(call)
        return original(call)

    monkeypatch.setattr(endpoint.Call, "_parse", counted)
    for path in ("/generate", "/invocations", "/tokenize"):
        assert httpx.post(live.url + path, content=b'{"text": "x"').status_code in (400, 422)
    assert parsed == [12, 12, 12]
    assert [len(call.body) for call in calls] == [0, 0, 0]


def test_what_is_refused_is_not_held() -> None:
    everything = Bodies()
    everything.held = bodies.MOST_HELD + bodies.KEPT_FOR_SMALL
    with everything.hold() as held, pytest.raises(RequestFailed) as caught:
        held.add(b"x")
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert everything.held == bodies.MOST_HELD + bodies.KEPT_FOR_SMALL
