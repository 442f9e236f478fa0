"""Every answer that the port gives by itself, byte by byte: upgrades, HTTP/1.0, malformed and endless requests, clocks,
clients that stop sending.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from api_server.http import protocol
from api_server.http.heads import MAX_HEAD_BYTES, MAX_HEADERS
from tests.api_server.conftest import LiveServer
from tests.api_server.http.conftest import KEEP_ALIVE, Answer, Line, endless, request
from tests.api_server.scheduler_double import SchedulerDouble

ASK = {"prompt": "x", "max_tokens": 20}
PING = request("/ping", b"", method="GET")
LAST_PING = request("/ping", b"", "Connection: close", method="GET")


def chunked(data: bytes, size: int = 7) -> bytes:
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def as_chunks(body: dict[str, Any], *headers: str) -> bytes:
    return request(
        "/v1/completions", chunked(json.dumps(body).encode()), "Transfer-Encoding: chunked", *headers, framed=False
    )


def events(answer: Answer) -> list[str]:
    return [event.removeprefix("data: ") for event in answer.body.decode().split("\n\n") if event.startswith("data: ")]


def test_many_requests_on_one_connection(line: Line) -> None:
    for _ in range(3):
        line.send(request("/v1/completions", ASK))
        assert line.answer().json["choices"][0]["text"] == "Hello, world!"
    line.send(request("/v1/completions", ASK), PING, request("/v1/models", method="GET"), LAST_PING)
    assert [line.answer().status for _ in range(4)] == [200] * 4
    assert line.ended


# Upgrades

OFFERS = [
    ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAB"),
    ("Connection: upgrade", "Upgrade: TLS/1.0"),
    ("Connection: keep-alive, Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eHg="),
]


def whole(data: bytes) -> list[bytes]:
    return [data]


def head_and_body(data: bytes) -> list[bytes]:
    head, _, body = data.partition(b"\r\n\r\n")
    return [head + b"\r\n\r\n", body]


def in_tens(data: bytes) -> list[bytes]:
    return [data[i : i + 10] for i in range(0, len(data), 10)]


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: offer[1])
@pytest.mark.parametrize("cut", [whole, head_and_body, in_tens])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_an_offer_to_upgrade_is_ignored_and_the_body_read(
    line: Line, offer: tuple[str, ...], cut: Callable[[bytes], list[bytes]], in_chunks: bool
) -> None:
    data = as_chunks(ASK, *offer) if in_chunks else request("/v1/completions", ASK, *offer)
    for _ in range(2):
        line.send(*cut(data), pause=0.002)
        assert line.answer().json["choices"][0]["text"] == "Hello, world!"
    line.send(data + LAST_PING)
    assert [line.answer().status, line.answer().status] == [200, 200]
    assert line.ended


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: offer[1])
def test_an_offer_to_upgrade_without_a_body(line: Line, offer: tuple[str, ...]) -> None:
    line.send(request("/v1/models", b"", *offer, method="GET") + LAST_PING)
    assert line.answer().json["object"] == "list"
    assert line.answer().body == b""
    assert line.ended


@pytest.mark.parametrize("apart", [False, True])
def test_the_body_of_a_request_is_no_request(line: Line, server: LiveServer, apart: bool) -> None:
    inner = request("/v1/completions", ASK)
    data = request("/v1/models", inner, *OFFERS[0])
    line.send(*(head_and_body(data) if apart else [data]), pause=0.05)
    assert line.answer().status == 405
    line.send(LAST_PING)
    assert line.answer().body == b""
    assert line.ended
    assert not server.double.submits


# HTTP/1.0


def test_an_old_client_gets_a_stream_without_chunks(line: Line) -> None:
    line.send(request("/v1/completions", ASK | {"stream": True}, version="1.0"))
    answer = line.answer()
    assert "transfer-encoding" not in answer.headers
    assert answer.headers["connection"] == "close"
    assert events(answer)[-1] == "[DONE]"
    assert answer.body.startswith(b"data: {")


@pytest.mark.parametrize("headers", [(), ("Connection: keep-alive",)])
def test_an_old_client_gets_one_whole_answer(line: Line, headers: tuple[str, ...]) -> None:
    line.send(request("/v1/completions", ASK, *headers, version="1.0") + PING)
    answer = line.answer()
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert answer.json["choices"][0]["text"] == "Hello, world!"
    assert line.ended


def test_an_old_client_may_leave_out_the_host(line: Line) -> None:
    line.send(b"HEAD /health HTTP/1.0\r\n\r\n")
    assert line.answer("HEAD").status == 200
    assert line.ended


# What is malformed


def head(*lines: str, body: bytes = b"") -> bytes:
    return "\r\n".join(["POST /v1/completions HTTP/1.1", *lines, "", ""]).encode("latin-1") + body


BODY = b'{"prompt": "x"}'
HELLO = b"5\r\n{    \r\n1\r\n}\r\n"
MALFORMED: dict[str, bytes] = {
    "length and chunks": head("Host: x", "Content-Length: 15", "Transfer-Encoding: chunked", body=BODY),
    "chunks and length": head("Host: x", "Transfer-Encoding: chunked", "Content-Length: 15", body=BODY),
    "the same length twice": head("Host: x", "Content-Length: 15", "Content-Length: 15", body=BODY),
    "two lengths": head("Host: x", "Content-Length: 15", "Content-Length: 5", body=BODY),
    "a list of lengths": head("Host: x", "Content-Length: 15, 15", body=BODY),
    "a length with a sign": head("Host: x", "Content-Length: +15", body=BODY),
    "a negative length": head("Host: x", "Content-Length: -15", body=BODY),
    "a hexadecimal length": head("Host: x", "Content-Length: 0xf", body=BODY),
    "an empty length": head("Host: x", "Content-Length:", body=BODY),
    "a length with a blank in it": head("Host: x", "Content-Length: 1 5", body=BODY),
    "a length of 20 digits": head("Host: x", "Content-Length: 99999999999999999999", body=BODY),
    "another coding first": head("Host: x", "Transfer-Encoding: gzip, chunked", body=HELLO),
    "another coding after": head("Host: x", "Transfer-Encoding: chunked, gzip", body=HELLO),
    "chunked twice": head("Host: x", "Transfer-Encoding: chunked, chunked", body=HELLO),
    "chunked in two headers": head("Host: x", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked", body=HELLO),
    "identity": head("Host: x", "Transfer-Encoding: identity", body=HELLO),
    "identity after chunked": head("Host: x", "Transfer-Encoding: chunked", "Transfer-Encoding: identity", body=HELLO),
    "an unknown coding": head("Host: x", "Transfer-Encoding: xchunked", body=HELLO),
    "a parameter of chunked": head("Host: x", "Transfer-Encoding: chunked;q=1", body=HELLO),
    "a coding with a form feed": head("Host: x", "Transfer-Encoding: \x0cchunked", body=HELLO),
    "a coding in quotes": head("Host: x", 'Transfer-Encoding: "chunked"', body=HELLO),
    "an empty coding": head("Host: x", "Transfer-Encoding:", body=HELLO),
    "chunks in HTTP/1.0": head("Host: x", "Transfer-Encoding: chunked", body=HELLO).replace(b"/1.1", b"/1.0"),
    "bare line feeds": head("Host: x", "Content-Length: 15", body=BODY).replace(b"\r\n", b"\n"),
    "a bare line feed between headers": head("Host: x\nX: y", "Content-Length: 15", body=BODY),
    "a bare line feed at the end": b"GET /ping HTTP/1.1\r\nHost: x\r\n\n",
    "a bare carriage return": head("Host: x\rX: y", "Content-Length: 15", body=BODY),
    "a folded header": head("Host: x", "X: y", " z", "Content-Length: 15", body=BODY),
    "a folded length": head("Host: x", "Content-Length:", " 15", body=BODY),
    "a blank before the first header": head(" Host: x", "Content-Length: 15", body=BODY),
    "a NUL in a value": head("Host: x", "X: a\0b", body=BODY),
    "a NUL in a name": head("Host: x", "X\0: a", body=BODY),
    "a blank before the colon": head("Host: x", "Content-Length : 15", body=BODY),
    "a blank in a name": head("Host: x", "Content Length: 15", body=BODY),
    "a header without colon": head("Host: x", "Content-Length", body=BODY),
    "a header without name": head("Host: x", ": 15", body=BODY),
    "no host": head("Content-Length: 15", body=BODY),
    "two hosts": head("Host: x", "Host: x", "Content-Length: 15", body=BODY),
    "two hosts in HTTP/1.0": head("Host: x", "Host: y").replace(b"/1.1", b"/1.0"),
    "a host with a path": head("Host: x/y", "Content-Length: 15", body=BODY),
    "a host with a user": head("Host: a@x", "Content-Length: 15", body=BODY),
    "a host with a blank": head("Host: x y", "Content-Length: 15", body=BODY),
    "no size of a chunk": head("Host: x", "Transfer-Encoding: chunked", body=b"\r\n\r\n"),
    "a size that is no number": head("Host: x", "Transfer-Encoding: chunked", body=b"g\r\n"),
    "a size with a prefix": head("Host: x", "Transfer-Encoding: chunked", body=b"0x5\r\n{    \r\n0\r\n\r\n"),
    "a negative size": head("Host: x", "Transfer-Encoding: chunked", body=b"-1\r\n"),
    "a size that overflows": head("Host: x", "Transfer-Encoding: chunked", body=b"fffffffffffffffff\r\n"),
    "a blank after a size": head("Host: x", "Transfer-Encoding: chunked", body=b"5 \r\n{    \r\n0\r\n\r\n"),
    "a chunk longer than its size": head("Host: x", "Transfer-Encoding: chunked", body=b"2\r\n{    \r\n0\r\n\r\n"),
    "a line feed after a size": head("Host: x", "Transfer-Encoding: chunked", body=b"5\n{    \r\n0\r\n\r\n"),
    "a line feed after a chunk": head("Host: x", "Transfer-Encoding: chunked", body=b"5\r\n{    \n0\r\n\r\n"),
    "a line feed in an extension": head("Host: x", "Transfer-Encoding: chunked", body=b"5;a\n\r\n{    \r\n0\r\n\r\n"),
    "a length in a trailer": head("Host: x", "Transfer-Encoding: chunked", body=b"0\r\nContent-Length: 5\r\n\r\n"),
    "a coding in a trailer": head("Host: x", "Transfer-Encoding: chunked", body=b"0\r\nTransfer-Encoding: x\r\n\r\n"),
    "a bad trailer": head("Host: x", "Transfer-Encoding: chunked", body=b"0\r\nX Y: z\r\n\r\n"),
    "a version in small letters": b"GET /ping http/1.1\r\nHost: x\r\n\r\n",
    "more after the version": b"GET /ping HTTP/1.1 x\r\nHost: x\r\n\r\n",
    "an unknown method": b"FETCH /ping HTTP/1.1\r\nHost: x\r\n\r\n",
    "a method in small letters": b"get /ping HTTP/1.1\r\nHost: x\r\n\r\n",
    "no path": b"GET ping HTTP/1.1\r\nHost: x\r\n\r\n",
    "a control character in the path": b"GET /pi\x01ng HTTP/1.1\r\nHost: x\r\n\r\n",
    "bytes beyond ASCII in the path": b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a tunnel": b"CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n\r\n",
    "HTTP/2 at once": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03",
}  # fmt: skip


@pytest.mark.parametrize("kind", MALFORMED)
def test_what_is_malformed_is_refused_and_ends_the_connection(line: Line, server: LiveServer, kind: str) -> None:
    line.send(MALFORMED[kind] + PING)
    answer = line.answer()
    assert answer.status == 400, answer.body
    assert answer.headers["connection"] == "close"
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert len(answer.json["error"]["message"]) > 10
    assert line.ended
    assert not server.double.submits


@pytest.mark.parametrize("version", [" HTTP/0.9", " HTTP/2.0", ""])
def test_other_versions_are_not_served(line: Line, version: str) -> None:
    line.send(f"GET /ping{version}\r\nHost: x\r\n\r\n".encode() + PING)
    assert line.answer().status == 505
    assert line.ended


def test_what_follows_a_last_request_is_not_read(line: Line, server: LiveServer) -> None:
    line.send(LAST_PING + request("/v1/completions", ASK))
    assert line.answer().status == 200
    assert line.ended
    assert not server.double.submits


@pytest.mark.parametrize(
    "trailers",
    [
        "X-Request-Id: a-trailer",
        "Connection: upgrade\r\nUpgrade: h2c\r\nX-Request-Id: a-trailer",
    ],
)
def test_trailers_are_no_headers(line: Line, trailers: str) -> None:
    body = chunked(json.dumps(ASK).encode())[:-2] + trailers.encode() + b"\r\n\r\n"
    line.send(request("/v1/completions", body, "Transfer-Encoding: chunked", framed=False))
    answer = line.answer()
    assert answer.status == 200
    assert answer.headers["x-request-id"] != "a-trailer"
    line.send(LAST_PING)
    assert line.answer().headers["x-request-id"] != "a-trailer"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_under_way_is_not_broken_by_what_follows(line: Line, server: LiveServer, stream: bool) -> None:
    endless(server.double)
    line.send(request("/v1/completions", {"prompt": "x", "max_tokens": 30, "stream": stream}))
    server.double.wait(lambda: server.double.running)
    line.send(b"this is no request\r\n\r\n")
    answer = line.answer()
    if stream:
        assert events(answer)[-1] == "[DONE]"
    else:
        assert answer.json["usage"]["completion_tokens"] == 30
    assert line.ended


# Bounds


def flood(line: Line, start: bytes, unit: bytes, limit: int = 8 << 20) -> int:
    """Sends units until an answer or the end of the connection comes; how many bytes went out."""
    sent = 0
    done = threading.Event()

    def wait() -> None:
        line.socket.recv(1, 2)  # MSG_PEEK
        done.set()

    threading.Thread(target=wait, daemon=True).start()
    try:
        line.send(start)
        while not done.is_set() and sent < limit:
            line.send(unit)
            sent += len(unit)
    except OSError:
        assert done.wait(60)
    return sent


CHUNKED = head("Host: x", "Transfer-Encoding: chunked")
ENDLESS = {
    "a header": (431, b"GET / HTTP/1.1\r\nHost: x\r\nX: ", b"a" * 10_000),
    "a name": (431, b"GET / HTTP/1.1\r\nHost: x\r\n", b"a" * 10_000),
    "a URL": (414, b"GET /", b"a" * 10_000),
    "headers": (431, b"GET / HTTP/1.1\r\nHost: x\r\n", b"X: y\r\n" * 100),
    "long headers": (431, b"GET / HTTP/1.1\r\nHost: x\r\n", b"X: " + b"y" * 1000 + b"\r\n"),
    "empty lines": (431, b"", b"\r\n" * 5000),
    "a trailer": (431, CHUNKED + b"1\r\n{\r\n0\r\nX: ", b"a" * 10_000),
    "trailers": (431, CHUNKED + b"1\r\n{\r\n0\r\n", b"X: y\r\n" * 100),
    "an extension of a chunk": (431, CHUNKED + b"1;", b"a" * 10_000),
    "a size": (400, CHUNKED, b"0" * 10_000),
}  # fmt: skip


@pytest.mark.parametrize("what", ENDLESS)
def test_what_has_no_end_is_refused(line: Line, what: str) -> None:
    status, start, unit = ENDLESS[what]
    sent = flood(line, start, unit)
    answer = line.answer()
    assert answer.status in (status, 431)
    assert sent < 8 << 20
    assert line.ended


@pytest.mark.parametrize("size", [MAX_HEAD_BYTES - 1, MAX_HEAD_BYTES, MAX_HEAD_BYTES + 1, 4 * MAX_HEAD_BYTES])
def test_what_is_malformed_and_too_large_is_refused_once(line: Line, size: int) -> None:
    line.send(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"\0" * size)
    assert line.answer().status == 400
    assert line.ended


def test_heads_up_to_the_bounds_are_read(server: LiveServer) -> None:
    state = "X-State: " + "s" * 100_000
    many = [f"X-{i}: y" for i in range(MAX_HEADERS - 1)]
    for headers, status in (([state], 200), ([state, state], 431), (many, 200), ([*many, "X: y"], 431)):
        line = Line(server)
        line.send(request("/ping", b"", *headers, method="GET"))
        assert line.answer().status == status
        line.close()


def test_the_bound_is_the_same_however_the_head_comes(server: LiveServer) -> None:
    filler = MAX_HEAD_BYTES - len(request("/ping", b"", "X: ", method="GET"))
    for length, status in ((filler, 200), (filler + 1, 431)):
        data = request("/ping", b"", "X: " + "y" * length, method="GET")
        for size in (1 << 30, 4096, 999):
            line = Line(server)
            line.send(*(data[i : i + size] for i in range(0, len(data), size)))
            assert line.answer().status == status, (length, size)
            line.close()


def test_a_large_body_is_no_large_head(line: Line) -> None:
    body = json.dumps(ASK).encode() + b" " * (3 * MAX_HEAD_BYTES)
    line.send(request("/v1/completions", body), request("/v1/completions", body))
    line.send(request("/v1/completions", chunked(body, 5000), "Transfer-Encoding: chunked", framed=False))
    assert [line.answer().status for _ in range(3)] == [200] * 3


# Clocks


def test_a_connection_that_never_says_anything_is_closed(hurried: float, server: LiveServer) -> None:
    started = time.monotonic()
    line = Line(server)
    assert line.ended
    # The usual clock is longer than this line's patience.
    assert time.monotonic() - started > hurried * 0.9
    line.close()


@pytest.mark.parametrize(
    "half", [b"G", b"GET /ping HTTP/1.1\r\nHost: x\r\n", request("/v1/completions", ASK)[:-3], CHUNKED + b"5\r\n{"]
)
@pytest.mark.parametrize("kept", [False, True])
def test_a_request_that_does_not_go_on_is_ended(hurried: float, server: LiveServer, half: bytes, kept: bool) -> None:
    line = Line(server)
    if kept:
        line.send(PING)
        assert line.answer().status == 200
    line.send(half)
    answer = line.answer()
    assert answer.status == 408
    assert "0 s" in answer.json["error"]["message"]
    assert line.ended
    line.close()


@pytest.mark.slow
def test_a_head_may_not_take_for_ever_in_small_pieces(hurried: float, server: LiveServer) -> None:
    line = Line(server)
    with contextlib.suppress(OSError):
        line.send(b"GET / HTTP/1.1\r\n", *[b"X: y\r\n"] * 1000, pause=0.02)
        pytest.fail("the server has let it go on")
    line.close()


@pytest.mark.slow
def test_a_body_that_trickles_is_ended(hurried: float, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and all of them together would take a minute."""
    monkeypatch.setattr(protocol, "BODY_BYTES_PER_SECOND", 50)
    line = Line(server)
    data = request("/v1/completions", ASK | {"pad": "x" * 600})
    cut = data.index(b"\r\n\r\n") + 4
    started = time.monotonic()
    line.send(data[:cut])
    with contextlib.suppress(OSError):
        line.send(*(data[i : i + 1] for i in range(cut, len(data))), pause=hurried / 4)
        pytest.fail("the server has let it go on")
    assert time.monotonic() - started > hurried
    answer = line.answer()
    assert answer.status == 408
    assert "more slowly than 50 bytes a second" in answer.json["error"]["message"]
    assert server.state.bodies.held == 0
    assert not server.double.submits
    line.close()


@pytest.mark.slow
def test_a_body_may_take_long_if_it_goes_on(
    hurried: float, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that stands still for a second ends no body.
    patience = 3 * hurried
    monkeypatch.setattr(protocol, "REQUEST_SECONDS", patience)
    monkeypatch.setattr(protocol, "BODY_BYTES_PER_SECOND", 20)
    line = Line(server)
    data = request("/v1/completions", ASK | {"pad": "x" * 300})
    cut = data.index(b"\r\n\r\n") + 4
    started = time.monotonic()
    line.send(data[:cut], *(data[i : i + 20] for i in range(cut, len(data), 20)), pause=patience / 10)
    assert time.monotonic() - started > 1.5 * patience
    assert line.answer().status == 200
    line.close()


@pytest.mark.slow
def test_an_answer_may_take_long(hurried: float, server: LiveServer) -> None:
    endless(server.double)
    line = Line(server)
    line.send(request("/v1/completions", {"prompt": "x", "max_tokens": 200, "stream": True}))
    time.sleep(1.5 * KEEP_ALIVE)
    line.send(b"GET /pi")  # the next request begins while the answer is under way, and does not go on
    assert events(line.answer())[-1] == "[DONE]"
    assert line.ended
    line.close()


@pytest.mark.slow
def test_an_idle_connection_is_closed_in_time_whatever_blank_lines_it_sends(line: Line) -> None:
    line.send(PING)
    assert line.answer().status == 200
    with contextlib.suppress(OSError):
        line.send(*[b"\r\n"] * 400, pause=KEEP_ALIVE / 20)
        pytest.fail("the server has kept it")


# Clients that send no more


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_stops_sending_with_its_request_gets_its_answer(
    line: Line, server: LiveServer, stream: bool, version: str
) -> None:
    endless(server.double)
    line.send(request("/v1/completions", {"prompt": "x", "max_tokens": 30, "stream": stream}, version=version))
    line.shut_down()
    answer = line.answer()
    assert answer.headers["connection"] == "close"
    check_whole_answer(answer, stream)
    assert line.ended


# A stream to HTTP/1.0 is the next test's.
@pytest.mark.parametrize(("stream", "version"), [(False, "1.0"), (False, "1.1"), (True, "1.1")])
def test_a_client_that_stops_sending_while_it_is_answered_gets_its_answer(
    line: Line, server: LiveServer, stream: bool, version: str
) -> None:
    endless(server.double)
    line.send(request("/v1/completions", {"prompt": "x", "max_tokens": 30, "stream": stream}, version=version))
    wait_for_tokens(server.double)
    line.shut_down()
    check_whole_answer(line.answer(), stream)
    assert line.ended


def test_a_stream_to_http_1_0_ends_when_its_client_stops_sending(line: Line, server: LiveServer) -> None:
    """No byte of such a stream tells a client that stops sending from one that left: docs/decisions.md."""
    endless(server.double)
    line.send(request("/v1/completions", {"prompt": "x", "max_tokens": 200, "stream": True}, version="1.0"))
    wait_for_tokens(server.double)
    line.shut_down()
    received = events(line.answer())
    assert 0 < len(received) < 200
    assert "[DONE]" not in received
    server.double.wait(lambda: not server.double.running)


def check_whole_answer(answer: Answer, stream: bool) -> None:
    if stream:
        assert events(answer)[-1] == "[DONE]"
    else:
        assert answer.json["usage"]["completion_tokens"] == 30


def wait_for_tokens(double: SchedulerDouble) -> None:
    double.wait(lambda: any(running.done > 2 for running in double.running.values()))


def test_all_requests_before_the_end_of_sending_are_answered(line: Line, server: LiveServer) -> None:
    server.double.step_seconds = 0.02
    line.send(request("/v1/completions", ASK) * 2 + PING)
    line.shut_down()
    assert [line.answer().status for _ in range(3)] == [200] * 3
    assert line.ended


def test_a_refusal_after_the_end_of_sending(line: Line) -> None:
    line.send(request("/v1/completions", {"prompt": 5}))
    line.shut_down()
    assert line.answer().status == 400
    assert line.ended


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_nothing_is_sent_is_noticed(
    line: Line, server: LiveServer, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when its stream has begun: what it must get next is the size of a chunk."""
    monkeypatch.setattr("api_server.generation.generation.SILENCE_BEFORE_HEADERS", 0.05)
    server.double.hold.set()
    line.send(request("/v1/completions", ASK | {"stream": stream}))
    server.double.wait(lambda: server.double.running)
    if stream:
        line.socket.recv(1, socket.MSG_PEEK)
    line.close()
    server.double.wait(lambda: not server.double.running)


def test_a_connection_that_ends_within_a_body(line: Line, server: LiveServer) -> None:
    line.send(request("/v1/completions", ASK)[:-1])
    line.shut_down()
    assert line.answer().status == 400
    assert line.ended
    assert not server.double.submits


def test_a_connection_that_ends_without_a_request(line: Line) -> None:
    line.send(b"GET /ping HTTP/1.1\r\n")
    line.shut_down()
    assert line.ended


def test_a_client_that_leaves_with_requests_in_line_is_noticed(line: Line, server: LiveServer) -> None:
    endless(server.double)
    line.send(request("/v1/completions", {"prompt": "x", "max_tokens": 10_000}), request("/v1/completions", ASK))
    server.double.wait(lambda: server.double.running)
    line.close()
    server.double.wait(lambda: server.double.cancelled)
    server.double.wait(lambda: not server.double.running)
    assert len(server.double.submits) == 1


@pytest.mark.slow
def test_requests_in_line_are_read_up_to_a_bound(line: Line, server: LiveServer) -> None:
    server.double.hold.set()
    line.send(request("/v1/completions", ASK))
    server.double.wait(lambda: server.double.running)
    line.socket.settimeout(1)
    sent = 0
    with contextlib.suppress(TimeoutError):
        for _ in range(2000):
            line.send(PING * 1000)
            sent += 1
    assert sent < 2000
    line.close()
    server.double.hold.clear()


def test_a_word_before_the_body_is_part_of_an_answer_that_has_begun(line: Line, server: LiveServer) -> None:
    server.double.hold.set()
    line.send(request("/v1/completions", ASK, "Expect: 100-continue"))
    line.shut_down()
    server.double.wait(lambda: server.double.running)
    server.double.hold.clear()
    assert line.answer().status == 100
    assert line.answer().status == 200
    assert line.ended
