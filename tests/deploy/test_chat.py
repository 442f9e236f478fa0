"""The terminal chat against a real HTTP server that speaks the OpenAI dialect and remembers what it was asked."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme


class Dialect(http.server.BaseHTTPRequestHandler):
    """Answers `echo: TEXT` in pieces; `endless` never ends, `refuse` is refused, `break` fails in mid-stream."""

    server: Recorder
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(200, json.dumps({"object": "list", "data": [{"id": "parrot"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        text = body["messages"][-1]["content"]
        if text == "refuse":
            self._send(400, json.dumps({"error": {"message": "the prompt is too long", "code": 400}}).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b": keep alive\n\n")
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        try:
            self._answer(text)
        except (BrokenPipeError, ConnectionResetError):
            self.server.hung_up.set()
        self.close_connection = True

    def _answer(self, text: str) -> None:
        for piece in ("echo: ", text[:2], text[2:]):
            self._event({"choices": [{"index": 0, "delta": {"content": piece}}]})
        if text == "break":
            self._event({"error": {"message": "the worker is gone"}})
            return
        while text == "endless":
            self._event({"choices": [{"index": 0, "delta": {"content": " and"}}]})
            self.server.hung_up.wait(0.02)
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Recorder(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Dialect)
        self.bodies: list[dict[str, Any]] = []
        self.hung_up = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def server() -> Iterator[Recorder]:
    with Recorder() as recorder:
        thread = threading.Thread(target=recorder.serve_forever, daemon=True)
        thread.start()
        yield recorder
        recorder.shutdown()
        thread.join()


def start(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "chat", *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def talk(server: Recorder, *lines: str, flags: tuple[str, ...] = ()) -> str:
    chat = start("--url", server.url, *flags)
    out, err = chat.communicate("".join(f"{line}\n" for line in lines), timeout=90)
    assert (chat.returncode, err) == (0, "")
    return out


def test_a_conversation_has_a_memory(server: Recorder) -> None:
    out = talk(server, "hello", "", "and you?")
    assert "parrot at http://" in out
    assert "echo: hello\n" in out
    assert "echo: and you?\n" in out
    assert server.bodies[0] == {"model": "parrot", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["hello", "echo: hello", "and you?"]


def test_the_system_message_opens_each_conversation(server: Recorder) -> None:
    out = talk(server, "one", "/reset", "two", "/exit", "never", flags=("--system", "Be brief.", "--model", "mine"))
    assert "(a new conversation)" in out
    system = {"role": "system", "content": "Be brief."}
    assert [body["messages"] for body in server.bodies] == [
        [system, {"role": "user", "content": "one"}],
        [system, {"role": "user", "content": "two"}],
    ]
    assert {body["model"] for body in server.bodies} == {"mine"}


def test_a_refused_question_is_explained_and_forgotten(server: Recorder) -> None:
    out = talk(server, "refuse", "hello", "/nonsense")
    assert "(400 Bad Request: the prompt is too long)" in out
    assert "no such command" in out
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["hello"]


def test_a_failure_in_mid_answer_is_told(server: Recorder) -> None:
    out = talk(server, "break", "still there?")
    assert "(the worker is gone)" in out
    assert "echo: still there?" in out


def test_ctrl_c_stops_the_answer_hangs_up_and_goes_on(server: Recorder) -> None:
    chat = start("--url", server.url)
    assert chat.stdin is not None
    assert chat.stdout is not None
    chat.stdin.write("endless\n")
    chat.stdin.flush()
    seen = ""
    while "and and" not in seen:
        seen += chat.stdout.read(1)
    chat.send_signal(signal.SIGINT)
    assert server.hung_up.wait(60)
    out, _ = chat.communicate("more\n/exit\n", timeout=90)
    assert "(stopped)" in out
    assert chat.returncode == 0
    kept = server.bodies[1]["messages"][1]
    assert kept["role"] == "assistant"
    assert kept["content"].startswith("echo: endless and")


def test_a_reader_that_has_enough_is_no_traceback(server: Recorder) -> None:
    chat = start("--url", server.url)
    assert chat.stdin is not None
    assert chat.stdout is not None
    assert chat.stderr is not None
    chat.stdin.write("endless\n")
    chat.stdin.flush()
    chat.stdout.readline()
    chat.stdout.close()
    assert chat.wait(timeout=60) == 0
    assert chat.stderr.read() == ""


def test_without_a_server_it_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    chat = start("--url", f"127.0.0.1:{port}")
    out, err = chat.communicate("hello\n", timeout=90)
    assert (chat.returncode, out) == (1, "")
    assert f"no server answers at 127.0.0.1:{port}" in err
    assert "start a server with `tokenyard serve`" in err
    assert "Traceback" not in err


@pytest.fixture
def secure(server: Recorder, tmp_path: Path) -> Recorder:
    """The same over TLS, with a certificate of an authority in `authority.pem` that no machine trusts."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "another.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return server


def test_a_private_authority_is_trusted_when_it_is_named(secure: Recorder, tmp_path: Path) -> None:
    url = secure.url.replace("http:", "https:")
    chat = start("--url", url, "--cacert", str(tmp_path / "authority.pem"))
    out, err = chat.communicate("hello\n", timeout=90)
    assert (chat.returncode, err) == (0, "")
    assert f"parrot at {url}" in out
    assert "echo: hello\n" in out


@pytest.mark.parametrize("flags", [(), ("--cacert", "another.pem")])
def test_an_authority_that_is_not_named_is_not_trusted(
    secure: Recorder, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    url = secure.url.replace("http:", "https:")
    chat = start("--url", url, *(flag.replace("another.pem", str(tmp_path / "another.pem")) for flag in flags))
    out, err = chat.communicate("hello\n", timeout=90)
    assert (chat.returncode, out) == (1, "")
    assert f"the certificate of {url} is not trusted" in err
    assert "name the PEM file of its authority with --cacert" in err
    assert not secure.bodies


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_without_authorities_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "authority.pem"
    if content is not None:
        file.write_text(content)
    chat = start("--url", "https://127.0.0.1:1", "--cacert", str(file))
    out, err = chat.communicate(timeout=60)
    assert (chat.returncode, out) == (2, "")
    assert f"cacert {str(file)!r} cannot be used" in err
    assert "give a PEM file" in err


@pytest.mark.parametrize("url", ["http://127.0.0.1:notaport", "http://", "ftp://127.0.0.1"])
def test_a_strange_url_is_no_traceback(url: str) -> None:
    chat = start("--url", url)
    _, err = chat.communicate(timeout=60)
    assert chat.returncode == 1
    assert "Traceback" not in err
