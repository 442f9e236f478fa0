"""The access log: a line a request, whatever became of it, with neither text nor key in it."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_server.access_log import LONGEST_PATH
from api_server.text.tokenizer import Tokenizer
from interfaces.result.results import ErrorCode, RequestError
from interfaces.wire.codec import encode as wire
from shared import logs
from shared.access_keys import AccessKeys, digest_of
from shared.endpoints import RunDirectory
from shared.settings import Settings
from tests.api_server.conftest import LiveServer, encode, serving
from tests.api_server.scheduler_double import SchedulerDouble

HTTP = httpx.Client(timeout=90)
KEY = secrets.token_urlsafe()
SECRET = "my-own-secret-prompt"


@pytest.fixture
def live(
    double: SchedulerDouble, run_directory: RunDirectory, tokenizer: Tokenizer, model_directory: Path
) -> Iterator[LiveServer]:
    with serving(double, run_directory, tokenizer, Settings(model=str(model_directory), access_log=True)) as server:
        yield server


@pytest.fixture
def lines(live: LiveServer, caplog: pytest.LogCaptureFixture) -> Callable[[int], list[dict[str, Any]]]:
    """The facts of as many lines, once they are there."""

    def found(count: int) -> list[dict[str, Any]]:
        def facts() -> list[dict[str, Any]]:
            records = [record for record in caplog.records if record.name == "tokenyard.access"]
            return [dict(vars(record)["facts"]) for record in records]

        live.double.wait(lambda: len(facts()) >= count)
        assert len(facts()) == count
        return facts()

    return found


Lines = Callable[[int], list[dict[str, Any]]]


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 50, **more}


def test_a_request_with_its_tokens_and_times(live: LiveServer, lines: Lines) -> None:
    live.state.keys = AccessKeys((digest_of(KEY),))
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "mine"}
    answer = HTTP.post(live.url + "/v1/chat/completions?a=b", json=chat(n=2), headers=headers).json()
    (line,) = lines(1)
    named = ("request_id", "client", "method", "path", "status", "outcome")
    assert [line[name] for name in named] == ["mine", "127.0.0.1", "POST", "/v1/chat/completions", 200, "ok"]
    assert line["key"] == f"key-{digest_of(KEY).removeprefix('sha256:')[:8]}"
    for name in ("prompt_tokens", "completion_tokens"):
        assert line[name] == answer["usage"][name] > 0
    assert 0 <= line["queue_seconds"] <= 1
    assert 0 < line["first_token_seconds"] <= line["seconds"] < 20


def test_a_stream_ends_when_its_last_frame_is_out(live: LiveServer, lines: Lines) -> None:
    live.double.step_seconds = 0.02
    text = HTTP.post(live.url + "/v1/chat/completions", json=chat(stream=True)).text
    assert text.endswith("data: [DONE]\n\n")
    (line,) = lines(1)
    assert (line["status"], line["outcome"]) == (200, "ok")
    assert line["completion_tokens"] >= 3
    assert line["first_token_seconds"] < line["seconds"]


def test_those_who_are_turned_away(live: LiveServer, lines: Lines) -> None:
    live.state.keys = AccessKeys((digest_of(KEY),))
    right = {"authorization": f"Bearer {KEY}"}
    HTTP.post(live.url + "/v1/completions", json={"prompt": SECRET})
    HTTP.post(live.url + "/v1/completions", json={"prompt": SECRET}, headers={"x-api-key": "wrong-" + KEY})
    HTTP.post(live.url + "/v1/completions", json={"prompt": SECRET, "max_tokens": -1}, headers=right)
    HTTP.post(live.url + "/v1/completions", content=b"{", headers=right)
    HTTP.get(live.url + "/no/such/page", headers=right)
    HTTP.get(live.url + "/v1/completions", headers=right)
    HTTP.post(live.url + "/flush_cache", headers=right | {"x-real-ip": "203.0.113.7"})
    live.double.refuse = RequestError(ErrorCode.OVERLOADED, "full")
    HTTP.post(live.url + "/v1/completions", json={"prompt": SECRET}, headers=right)
    told = [(line["status"], line["outcome"]) for line in lines(8)]
    assert told == [
        *((401, "unauthorized"), (401, "unauthorized"), (400, "invalid"), (400, "invalid"), (404, "invalid")),
        *((405, "invalid"), (403, "unauthorized"), (429, "overloaded")),
    ]
    assert [line.get("key", "") for line in lines(8)][:2] == ["", ""]


@pytest.mark.parametrize(("stream", "status"), [(True, 200), (False, 499)])
def test_a_client_that_leaves(live: LiveServer, lines: Lines, stream: bool, status: int) -> None:
    ids = encode(live.state.tokenizer, "Hello, world!")
    live.double.answer = lambda _: ids
    live.double.step_seconds = 0.01
    body = json.dumps(chat(stream=stream, max_tokens=200)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2])), timeout=90) as connection:
        connection.sendall(head + body)
        live.double.wait(lambda: any(running.done > 3 for running in live.double.running.values()))
        if stream:
            connection.recv(100)
    (line,) = lines(1)
    assert (line["status"], line["outcome"]) == (status, "cancelled")
    assert 0 < line["completion_tokens"] < 200


def test_a_stream_that_fails_in_its_middle(live: LiveServer, lines: Lines) -> None:
    ids = encode(live.state.tokenizer, "Hello, world!")
    live.double.answer = lambda _: ids
    live.double.step_seconds = 0.01
    with HTTP.stream("POST", live.url + "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        live.double.wait(lambda: any(running.done > 3 for running in live.double.running.values()))
        failure = live.double._refusal(live.double.submits[0], RequestError(ErrorCode.FAILED, "the model failed"))
        live.double.send_raw(wire(failure))
        assert "the model failed" in response.read().decode()
    (line,) = lines(1)
    assert (line["status"], line["outcome"]) == (200, "failed")


def test_a_batch_counts_each_prompt_once(live: LiveServer, lines: Lines) -> None:
    body = {"text": ["Hello", "Hello, world!"], "sampling_params": {"max_new_tokens": 3, "n": 2}}
    answers = HTTP.post(live.url + "/generate", json=body).json()
    (line,) = lines(1)
    assert line["completion_tokens"] == sum(answer["meta_info"]["completion_tokens"] for answer in answers) == 12
    assert line["prompt_tokens"] == sum(answer["meta_info"]["prompt_tokens"] for answer in answers) // 2


def test_what_generates_nothing_has_no_tokens(live: LiveServer, lines: Lines) -> None:
    HTTP.get(live.url + "/v1/models")
    (line,) = lines(1)
    assert set(line) == {"request_id", "client", "method", "path", "status", "outcome", "seconds"}


def test_a_health_page_that_says_no_is_no_failure(live: LiveServer, lines: Lines) -> None:
    live.double.ready = False
    live.double.wait(lambda: not live.state.engine.health().ready)
    HTTP.get(live.url + "/ready")
    (line,) = lines(1)
    assert (line["status"], line["outcome"]) == (503, "unavailable")


def test_a_path_is_written_as_it_was_sent(live: LiveServer, lines: Lines) -> None:
    HTTP.get(live.url + "/v1/models/a%0AERROR%20b?key=abc")
    HTTP.get(live.url + "/" + "y" * 5000)
    first, second = lines(2)
    assert first["path"] == "/v1/models/a%0AERROR%20b"
    assert len(second["path"]) == LONGEST_PATH


@pytest.mark.parametrize("form", logs.FORMATS)
def test_no_text_and_no_key_is_written(
    live: LiveServer, lines: Lines, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    live.state.keys = AccessKeys((digest_of(KEY),))
    headers = {"authorization": f"Bearer {KEY}"}
    for body in (chat(), chat(stream=True), chat(temperature=-1), chat(max_tokens=10**9)):
        HTTP.post(live.url + "/v1/chat/completions", json=body, headers=headers)
    lines(4)
    written = "\n".join(logs._Formatter("api_server:0", form).format(record) for record in caplog.records)
    assert "/v1/chat/completions" in written
    for word in (SECRET, KEY, digest_of(KEY), "world"):
        assert word not in written


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("header", "trace"),
    [
        (f"00-{TRACE}-00f067aa0ba902b7-01", TRACE),
        (f"01-{TRACE}-00f067aa0ba902b7-01-more", TRACE),
        (f"ff-{TRACE}-00f067aa0ba902b7-01", None),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-00f067aa0ba902b7-01", None),
        ("nonsense", None),
    ],
)
def test_every_line_of_a_request_has_its_id_and_trace(live: LiveServer, header: str, trace: str | None) -> None:
    written: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(self.format(record))

    keep = Keep()
    keep.setFormatter(logs._Formatter("api_server:0", "json"))
    logging.getLogger().addHandler(keep)
    try:
        HTTP.get(live.url + "/v1/models", headers={"traceparent": header, "x-request-id": "mine"})
        deadline = time.monotonic() + 5
        while not written and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        logging.getLogger().removeHandler(keep)
    record = json.loads(written[-1])
    assert (record["message"], record["request_id"], record.get("trace_id")) == ("access", "mine", trace)
