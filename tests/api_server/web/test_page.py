"""How the page at /ui/ is served: its headers, its tags, its coding, who may have it, and --no-ui."""

from __future__ import annotations

import dataclasses
import gzip
import secrets

import httpx
import pytest

from api_server.app import create
from api_server.web.page import FOLDER, prefers_html
from shared.access_keys import AccessKeys, digest_of
from tests.api_server.conftest import LiveServer

SCRIPT = next(path.name for path in FOLDER.glob("*.js"))
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def test_the_page_keeps_a_browser_to_this_server(live: LiveServer) -> None:
    answer = httpx.get(live.url + "/ui/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert not {"unsafe-inline", "unsafe-eval", "http:", "https:", "*"} & {word.strip("';") for word in policy.split()}
    assert "<script>" not in answer.text
    assert "style=" not in answer.text
    assert answer.headers["cache-control"] == "no-cache"
    again = httpx.get(live.url + "/ui/", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_files_are_compressed_and_last(live: LiveServer) -> None:
    content = (FOLDER / SCRIPT).read_bytes()
    plain = httpx.get(f"{live.url}/ui/{SCRIPT}", headers={"accept-encoding": "identity"})
    assert (plain.content, "content-encoding" in plain.headers) == (content, False)
    assert "immutable" in plain.headers["cache-control"]
    with httpx.stream("GET", f"{live.url}/ui/{SCRIPT}", headers={"accept-encoding": "gzip"}) as zipped:
        raw = b"".join(zipped.iter_raw())
        assert zipped.headers["content-encoding"] == "gzip"
    assert gzip.decompress(raw) == content
    for name in ("nothing.js", "..%2fpage.py", "index.html.gz"):
        assert httpx.get(f"{live.url}/ui/{name}").status_code == 404


def test_browsers_are_sent_to_it_and_others_are_not(live: LiveServer) -> None:
    sent = httpx.get(live.url + "/", headers={"accept": BROWSER})
    assert (sent.status_code, sent.headers["location"]) == (307, "/ui/")
    assert httpx.get(live.url + "/ui").headers["location"] == "/ui/"
    for accept in ("*/*", "application/json", "", "application/json, text/html"):
        assert "tokenyard serves" in httpx.get(live.url + "/", headers={"accept": accept}).text


@pytest.mark.parametrize(("accept", "expected"), [(BROWSER, True), ("Text/HTML;q=1", True), ("*/*, text/html", False)])
def test_who_prefers_html(accept: str, expected: bool) -> None:
    assert prefers_html(accept) is expected


def test_it_needs_no_key_and_its_figures_do(live: LiveServer) -> None:
    key = secrets.token_urlsafe()
    live.state.keys = AccessKeys((digest_of(key),), (digest_of("operator"),))
    for path in ("/ui/", f"/ui/{SCRIPT}"):
        assert httpx.get(live.url + path).status_code == 200
    assert httpx.get(live.url + "/live").status_code == 401
    shown = httpx.get(live.url + "/live", headers={"x-api-key": key}).json()
    assert shown["operator"] is False
    assert "process" not in shown
    shown = httpx.get(live.url + "/live", headers={"x-api-key": "operator"}).json()
    assert shown["operator"] is True
    assert shown["process"]["pid"] > 0


async def test_no_ui_serves_none_of_it(live: LiveServer) -> None:
    live.state.settings = dataclasses.replace(live.state.settings, ui=False)
    transport = httpx.ASGITransport(create(live.state), client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        for path in ("/ui", "/ui/", f"/ui/{SCRIPT}"):
            assert (await http.get(path)).status_code == 404
        assert "tokenyard serves" in (await http.get("/", headers={"accept": BROWSER})).text
