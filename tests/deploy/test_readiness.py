"""Readiness as an HTTP client sees it, and what the operator is told then."""

from __future__ import annotations

import http.server
import json
import shlex
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.readiness import Announcer, example, url_of
from shared.settings import Settings


class Slow(http.server.BaseHTTPRequestHandler):
    """Answers 503 with a reason `refusals` times, then 200."""

    refusals = 0

    def do_GET(self) -> None:
        refused = Slow.refusals > 0
        Slow.refusals -= 1
        self.send_response(503 if refused else 200)
        self.end_headers()
        self.wfile.write(b"no worker is ready" if refused else b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def settings() -> Iterator[Settings]:
    with http.server.HTTPServer(("127.0.0.1", 0), Slow) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield Settings(port=server.server_address[1], served_model_name="tiny")
        server.shutdown()
        thread.join()


def scheduler_problem() -> str | None:
    raise AssertionError("HTTP answers: nobody else is asked")


class Ear:
    """Hears what an announcer says, from its thread."""

    def __init__(self, lines: int) -> None:
        self.heard: list[tuple[str, str]] = []
        self._lines = lines
        self.enough = threading.Event()

    def __call__(self, level: str, text: str) -> None:
        self.heard.append((level, text))
        if len(self.heard) == self._lines:
            self.enough.set()


def test_it_waits_for_a_200_then_names_the_url_and_a_line_to_try(settings: Settings) -> None:
    Slow.refusals = 3
    ear = Ear(3)
    Announcer(settings, scheduler_problem).start(ear)
    assert ear.enough.wait(60)
    assert Slow.refusals < 0
    assert ear.heard[0][1].startswith("ready after ")
    assert ear.heard[1] == ("INFO", f"try: {example(settings)}")
    assert url_of(settings) in ear.heard[2][1]


@pytest.mark.parametrize(
    ("task", "path"), [("embed", "/v1/embeddings"), ("rerank", "/v1/rerank"), ("classify", "/classify")]
)
def test_the_line_to_try_is_for_the_servers_task(task: str, path: str) -> None:
    words = shlex.split(example(Settings(model="some/model", task=task)))
    assert words[1].endswith(path)
    assert json.loads(words[-1])["model"] == "model"


def test_impatience_tells_the_last_answer(settings: Settings) -> None:
    Slow.refusals = 10**6
    ear = Ear(1)
    Announcer(settings, scheduler_problem, patience=0.3).start(ear)
    assert ear.enough.wait(60)
    level, text = ear.heard[0]
    assert level == "WARNING"
    assert "does not answer 200 after 0.3 s: 503 no worker is ready" in text


def test_where_http_wants_a_certificate_the_scheduler_is_asked() -> None:
    """Nothing listens there: an HTTP request would fail."""
    answers = iter(["starting", "no worker is ready", None])
    ear = Ear(3)
    settings = Settings(port=9, ssl_certfile="server.pem", ssl_ca_certs="authorities.pem")
    Announcer(settings, lambda: next(answers), patience=10).start(ear)
    assert ear.enough.wait(60)
    assert list(answers) == []
    assert ear.heard[0][1].startswith("ready after ")


def test_proxies_of_the_environment_are_not_asked(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    Slow.refusals = 0
    ear = Ear(3)
    Announcer(settings, scheduler_problem, patience=5).start(ear)
    assert ear.enough.wait(60)
    assert ear.heard[0][0] == "INFO"


@pytest.mark.slow
def test_a_stopped_announcer_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ear = Ear(1)
    announcer = Announcer(Settings(port=port), scheduler_problem, patience=0.5)
    announcer.start(ear)
    announcer.stop()
    assert not ear.enough.wait(1.0)


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8000"), ("0.0.0.0", "http://127.0.0.1:8000"), ("::", "http://[::1]:8000")],
)
def test_the_url_is_one_that_works_here(host: str, url: str) -> None:
    assert url_of(Settings(host=host)) == url


@given(st.text("ab'\"$`\\ é", min_size=1))
def test_the_example_survives_a_shell(name: str) -> None:
    words = shlex.split(example(Settings(served_model_name=name)))
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == name
    assert body["messages"][0]["role"] == "user"
