"""Web pages as callers: preflights, the headers on every kind of answer, and what no page may do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from api_server.http.pages import allow_pages
from api_server.text.tokenizer import Tokenizer
from api_server.web.access import PUBLIC_PATHS
from shared.access_keys import with_digests
from shared.endpoints import RunDirectory
from shared.settings import Settings, SettingsError
from tests.api_server.conftest import LiveServer, encode, serving
from tests.api_server.scheduler_double import SchedulerDouble

KEY = "a-key-of-this-test"
LOCAL = [
    *("http://localhost:5173", "http://127.0.0.1:3000", "https://localhost", "http://[::1]:8080"),
    "http://app.localhost",
]
FOREIGN = [
    *("https://example.com", "http://localhost.example.com", "http://192.168.1.5:3000", "null"),
    *("http://127.0.0.1.example.com", "http://localhost:80@example.com", "http://xlocalhost", "file://"),
]
ASK = {"prompt": "x", "max_tokens": 20}
PATHS = ["/v1/chat/completions", "/v1/messages", "/generate", "/v1/models", "/nothing"]


def page(origins: str, *, has_keys: bool) -> TestClient:
    return TestClient(allow_pages(PlainTextResponse("x"), origins, PUBLIC_PATHS, has_keys))


def preflight(client: Any, path: str, origin: str, **more: str) -> Any:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
    return client.options(path, headers={"origin": origin} | asked | more)


def allowed(client: Any, path: str, origin: str) -> str | None:
    """What a preflight and an ordinary request are told; both the same."""
    answers = [preflight(client, path, origin), client.get(path, headers={"origin": origin})]
    first, second = [answer.headers.get("access-control-allow-origin") for answer in answers]
    assert first == second
    return None if first is None else str(first)


def test_without_keys_pages_of_this_host_are_allowed() -> None:
    client = page("auto", has_keys=False)
    assert [allowed(client, "/generate", origin) for origin in LOCAL] == LOCAL
    assert {allowed(client, "/generate", origin) for origin in FOREIGN} == {None}


@pytest.mark.slow
def test_with_keys_all_pages_are_allowed_where_a_key_is_wanted() -> None:
    client = page("auto", has_keys=True)
    assert {allowed(client, "/generate", origin) for origin in [*LOCAL, *FOREIGN]} == {"*"}
    for path in PUBLIC_PATHS:
        assert [allowed(client, path, origin) for origin in LOCAL] == LOCAL
        assert {allowed(client, path, origin) for origin in FOREIGN} == {None}


@pytest.mark.parametrize("has_keys", [False, True])
def test_the_setting_is_what_counts_when_it_is_given(has_keys: bool) -> None:
    everywhere = [*LOCAL, *FOREIGN]
    assert {allowed(page("*", has_keys=has_keys), "/metrics", origin) for origin in everywhere} == {"*"}
    assert {allowed(page("none", has_keys=has_keys), "/generate", origin) for origin in everywhere} == {None}
    client = page("https://example.com, http://192.168.1.5:3000,null", has_keys=has_keys)
    assert {allowed(client, "/generate", origin) for origin in everywhere} == {
        *("https://example.com", "http://192.168.1.5:3000", "null"),
        None,
    }


def test_caches_are_told_that_answers_depend_on_the_origin() -> None:
    for origin in (LOCAL[0], FOREIGN[0]):
        client = page("auto", has_keys=False)
        assert "origin" in client.get("/generate", headers={"origin": origin}).headers["vary"].lower()
        assert "origin" in preflight(client, "/generate", origin).headers["vary"].lower()


def test_a_page_of_the_internet_may_call_into_a_private_network_if_it_is_listed() -> None:
    name = "access-control-request-private-network"
    answer = preflight(
        page("https://example.com", has_keys=False), "/generate", "https://example.com", **{name: "true"}
    )
    assert answer.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize(
    "text",
    [
        *("", "https://example.com/", "example.com", "https://*.example.com", "https://a.com,", "*,https://a.com"),
        *("https://example.com/path", "https://a@b.com", "https://EXAMPLE.com", "auto,none", "https://a.com b.com"),
    ],
)
def test_what_is_no_origin_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(SettingsError, match="cors_origins"):
        Settings(cors_origins=text)


@pytest.mark.parametrize(
    "text", ["https://example.com", "http://[::1]:3000, null", "chrome-extension://abcdef", "app://x"]
)
def test_origins_that_browsers_send(text: str) -> None:
    Settings(cors_origins=text)


# The whole server


@pytest.fixture(scope="module")
def locked(
    tokenizer: Tokenizer, model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    run_directory = RunDirectory(tmp_path_factory.mktemp("run"))
    answer = [*encode(tokenizer, "Hello, world!"), tokenizer.eos_token_ids[0]]
    double = SchedulerDouble(run_directory.api_endpoint, lambda _: answer, vocab_size=tokenizer.vocab_size)
    with serving(
        double, run_directory, tokenizer, with_digests(Settings(model=str(model_directory), api_key=KEY))
    ) as server:
        yield server
    double.close()


@pytest.mark.parametrize("path", PATHS)
def test_a_preflight_needs_no_key(locked: LiveServer, path: str) -> None:
    answer = preflight(httpx, locked.url + path, FOREIGN[0])
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert "POST" in answer.headers["access-control-allow-methods"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", ASK, 200),
        ("/v1/completions", ASK | {"stream": True}, 200),
        ("/v1/completions", {"prompt": 5}, 400),
        ("/v1/nothing", ASK, 404),
        ("/v1/models", ASK, 405),
    ],
)
def test_every_answer_can_be_read_by_the_page(locked: LiveServer, path: str, body: dict[str, Any], status: int) -> None:
    headers = {"origin": FOREIGN[0], "authorization": f"Bearer {KEY}"}
    answer = httpx.post(locked.url + path, json=body, headers=headers)
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == "*"
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "request-id", "retry-after", "x-prompt-tokens"} <= set(exposed)
    unknown = httpx.post(locked.url + path, json=body, headers={"origin": FOREIGN[0]})
    assert (unknown.status_code, unknown.headers["access-control-allow-origin"]) == (401, "*")


def test_a_request_of_no_page_gets_no_such_headers(server: LiveServer) -> None:
    answer = httpx.post(server.url + "/v1/completions", json=ASK)
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_options_that_are_no_preflight(server: LiveServer) -> None:
    answer = httpx.options(server.url + "/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


# What no page may do


@pytest.mark.parametrize(
    "kind", [None, "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/generate", "/v1/score"])
def test_what_a_form_can_send_is_not_run_for_a_page(server: LiveServer, path: str, kind: str | None) -> None:
    headers = {"origin": FOREIGN[0]} | ({} if kind is None else {"content-type": kind})
    answer = httpx.post(server.url + path, content=b'{"prompt": "x", "text": "x"}', headers=headers)
    assert answer.status_code == 415
    assert not server.double.submits
