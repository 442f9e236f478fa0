"""Clients that read nothing of an answer, and clients that read it slowly."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from api_server.http import protocol
from tests.api_server.conftest import LiveServer
from tests.api_server.http.conftest import SMALL_BUFFER, UNREAD, Line, endless, read_all, request


@pytest.fixture
def unread_line(server: LiveServer, small_buffers: None) -> Iterator[Line]:
    line = Line(server, receive_buffer=SMALL_BUFFER)
    yield line
    line.close()


STREAM = {"prompt": "x", "max_tokens": 200, "stream": True, "logprobs": 5}


def test_a_client_that_never_reads_its_answer_is_ended(
    unread_line: Line, server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    endless(server.double)
    unread_line.send(request("/v1/completions", STREAM))
    server.double.wait(lambda: any(running.done > 100 for running in server.double.running.values()))
    server.double.hold.set()
    server.double.wait(lambda: not server.double.running, 10)
    assert "has read nothing of its answer" in caplog.text
    with pytest.raises(ConnectionResetError):
        read_all(unread_line)


def test_an_unread_answer_ends_also_when_it_is_complete(unread_line: Line) -> None:
    """The connection is closed then, and waits for the rest to go out."""
    unread_line.send(request("/openapi.json", b"", "Connection: close", method="GET"))
    unread_line.wait_for_reset()
    with pytest.raises(ConnectionResetError):
        read_all(unread_line)


def test_a_client_that_reads_slowly_gets_its_whole_answer(unread_line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    # A machine that stands still for a second ends no answer.
    patience = 3 * UNREAD
    monkeypatch.setattr(protocol, "UNREAD_SECONDS", patience)
    unread_line.send(request("/openapi.json", b"", "Connection: close", method="GET"))
    started = time.monotonic()
    for _ in range(20):
        time.sleep(patience / 15)
        assert len(unread_line.socket.recv(4096)) > 100
    assert time.monotonic() - started > patience
    assert b"".join(read_all(unread_line)).endswith(b"}")
