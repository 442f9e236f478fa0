"""One server for all raw requests of this folder, and a socket that says exactly what it is told."""

from __future__ import annotations

import http.client
import json
import select
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from api_server.http import protocol
from api_server.text.tokenizer import Tokenizer
from shared.endpoints import RunDirectory
from shared.settings import Settings
from tests.api_server.conftest import LiveServer, encode, serving
from tests.api_server.scheduler_double import SchedulerDouble

KEEP_ALIVE = 1
"""Seconds that this folder's server keeps idle connections."""

# What the fixture `small_buffers` makes of buffers, in bytes, and of the time to read, in seconds.
SMALL_BUFFER = 4096
UNREAD = 0.6


@pytest.fixture(scope="module")
def port_server(
    tokenizer: Tokenizer, model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    run_directory = RunDirectory(tmp_path_factory.mktemp("run"))
    answer = [*encode(tokenizer, "Hello, world!"), tokenizer.eos_token_ids[0]]
    double = SchedulerDouble(run_directory.api_endpoint, lambda _: answer, vocab_size=tokenizer.vocab_size)
    settings = Settings(model=str(model_directory), keep_alive_timeout=KEEP_ALIVE)
    with serving(double, run_directory, tokenizer, settings) as server:
        yield server
    double.close()


@pytest.fixture
def server(port_server: LiveServer) -> Iterator[LiveServer]:
    """The same server each time, as if it were new."""
    double, answer = port_server.double, port_server.double.answer
    double.submits.clear()
    double.cancelled.clear()
    yield port_server
    double.answer, double.step_seconds = answer, 0.001
    double.hold.clear()
    double.wait(lambda: not double.running)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> float:
    """The clocks of requests that are not complete, shortened."""
    monkeypatch.setattr(protocol, "REQUEST_SECONDS", 0.4)
    return 0.4


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch, hurried: float) -> None:
    """The server's sockets hold little, so that an answer waits in the process, and few seconds for its reader."""
    monkeypatch.setattr(protocol, "UNREAD_SECONDS", UNREAD)
    made = protocol.HttpProtocol.connection_made

    def connection_made(self: protocol.HttpProtocol, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
        made(self, transport)

    monkeypatch.setattr(protocol.HttpProtocol, "connection_made", connection_made)


def read_all(line: Line) -> list[bytes]:
    return list(iter(lambda: line.socket.recv(1 << 16), b""))


def endless(double: SchedulerDouble) -> None:
    """Each answer goes on until its request wants no more tokens."""
    double.answer = lambda _: [40]
    double.step_seconds = 0.01


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Line:
    """A connection on which bytes go as they are, and answers are read one after the other."""

    def __init__(
        self, server: LiveServer, tls: ssl.SSLContext | None = None, receive_buffer: int | None = None
    ) -> None:
        target = urlsplit(server.url)
        self.socket = socket.socket()
        self.socket.settimeout(25)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect((target.hostname, target.port or 0))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="127.0.0.1")
        self._reader = self.socket.makefile("rb")

    def send(self, *pieces: bytes, pause: float = 0.0) -> None:
        for piece in pieces:
            self.socket.sendall(piece)
            time.sleep(pause)

    def wait_for_reset(self) -> None:
        """Return when the server has broken the connection off. Reads nothing."""
        poller = select.poll()
        poller.register(self.socket, 0)  # errors and hang-ups always count
        assert poller.poll(60_000), "the server has not broken the connection off"

    def shut_down(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._reader.close()
        self.socket.close()

    def answer(self, method: str = "POST") -> Answer:
        version, status, _ = self._reader.readline().decode().split(" ", 2)
        assert version == "HTTP/1.1"
        headers = http.client.parse_headers(self._reader)
        return Answer(int(status), headers, b"" if method == "HEAD" else self._body(int(status), headers))

    def _body(self, status: int, headers: Message) -> bytes:
        if status == 100:
            return b""
        if headers["transfer-encoding"] == "chunked":
            return b"".join(self._chunks())
        return self._reader.read(int(headers["content-length"]) if "content-length" in headers else -1)

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self._reader.readline(), 16):
            yield self._reader.read(size)
            assert self._reader.readline() == b"\r\n"
        assert self._reader.readline() == b"\r\n"

    @property
    def ended(self) -> bool:
        """Whether the server ends the connection, and says nothing more before that."""
        try:
            return self._reader.read(1) == b""
        except ConnectionResetError:
            return True


@pytest.fixture
def line(server: LiveServer) -> Iterator[Line]:
    opened = Line(server)
    yield opened
    opened.close()


def request(
    path: str = "/v1/completions",
    body: bytes | dict[str, Any] = b"",
    *headers: str,
    method: str = "POST",
    version: str = "1.1",
    framed: bool = True,
) -> bytes:
    """A request with a Host header; with a Content-Length, too, unless it is not to be framed."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    lines = [f"{method} {path} HTTP/{version}", "Host: x", *headers]
    if framed and method == "POST":
        lines.append(f"Content-Length: {len(data)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + data
