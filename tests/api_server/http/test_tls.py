"""The port's rules over TLS, where a connection cannot be half closed."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import trustme

from api_server.http.heads import MAX_HEAD_BYTES
from api_server.text.tokenizer import Tokenizer
from shared.endpoints import RunDirectory
from shared.settings import Settings
from tests.api_server.conftest import LiveServer, encode, serving
from tests.api_server.http.conftest import SMALL_BUFFER, Line, read_all, request
from tests.api_server.scheduler_double import SchedulerDouble

ASK = {"prompt": "x", "max_tokens": 20}
OFFER = ("Connection: Upgrade", "Upgrade: h2c")

Opened = Callable[..., Line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a certificate for 127.0.0.1, and its authority."""
    path = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(path / "server.pem"))
    authority.cert_pem.write_to_path(str(path / "authority.pem"))
    return path


@pytest.fixture(scope="module")
def secure(tokenizer: Tokenizer, model_directory: Path, folder: Path) -> Iterator[LiveServer]:
    run_directory = RunDirectory(folder)
    answer = [*encode(tokenizer, "Hello, world!"), tokenizer.eos_token_ids[0]]
    double = SchedulerDouble(run_directory.api_endpoint, lambda _: answer, vocab_size=tokenizer.vocab_size)
    settings = Settings(model=str(model_directory), ssl_certfile=str(folder / "server.pem"))
    with serving(double, run_directory, tokenizer, settings) as server:
        yield server
    double.close()


@pytest.fixture
def opened(secure: LiveServer, folder: Path) -> Opened:
    trusted = ssl.create_default_context(cafile=str(folder / "authority.pem"))
    return partial(Line, secure, trusted)


def test_requests_and_offers_to_upgrade(opened: Opened) -> None:
    line = opened()
    for headers in ((), OFFER, ()):
        line.send(request("/v1/completions", ASK, *headers))
        assert line.answer().json["choices"][0]["text"] == "Hello, world!"
    line.close()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 2 * MAX_HEAD_BYTES, 431),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
    ],
)
def test_what_is_refused(opened: Opened, data: bytes, status: int) -> None:
    line = opened()
    line.send(data)
    assert line.answer().status == status
    assert line.ended
    line.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed(opened: Opened, secure: LiveServer, stream: bool) -> None:
    secure.double.hold.set()
    line = opened()
    line.send(request("/v1/completions", ASK | {"stream": stream}))
    secure.double.wait(lambda: secure.double.running)
    line.close()
    secure.double.wait(lambda: not secure.double.running)
    secure.double.hold.clear()


def test_a_client_that_never_reads_its_answer_is_ended(
    opened: Opened, secure: LiveServer, small_buffers: None, hurried: float, caplog: pytest.LogCaptureFixture
) -> None:
    line = opened(receive_buffer=SMALL_BUFFER)
    ask = request("/openapi.json", b"", method="GET")
    line.send(ask)
    whole = line.answer("GET").body
    line.send(ask * 4)
    secure.double.wait(lambda: "has read nothing of its answer" in caplog.text)
    line.wait_for_reset()
    with contextlib.suppress(ConnectionResetError):
        assert sum(map(len, read_all(line))) < 2 * len(whole)
    line.close()
