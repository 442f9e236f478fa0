"""Who gets in: every route, every dialect's 401, the operator's routes, and what the server tells of its keys."""

from __future__ import annotations

import dataclasses
import secrets
import socket

import anthropic
import httpx
import openai
import pytest
from starlette.routing import Route

from api_server.app import create
from api_server.web import page
from api_server.web.access import PUBLIC_PATHS
from shared.access_keys import AccessKeys, digest_of
from shared.settings import Settings, SettingsError
from tests.api_server.conftest import LiveServer

HTTP = httpx.Client(timeout=90)
KEYS = [secrets.token_urlsafe() for _ in range(3)]
ADMIN = secrets.token_urlsafe()


@pytest.fixture
def guarded(live: LiveServer) -> LiveServer:
    live.state.keys = AccessKeys(tuple(map(digest_of, KEYS)), (digest_of(ADMIN),))
    return live


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_every_route_but_the_public_ones_wants_a_key(guarded: LiveServer) -> None:
    routes = [route for route in create(guarded.state).routes if isinstance(route, Route)]
    checked = 0
    for route in routes:
        for method in (route.methods or set()) - {"HEAD"}:
            public = route.path in PUBLIC_PATHS | page.paths() or (route.path, method) == ("/", "GET")
            response = HTTP.request(method, guarded.url + route.path, headers=bearer("wrong"))
            if public:
                assert response.status_code in (200, 308, 503), route.path
                continue
            checked += 1
            assert response.status_code == 401, (method, route.path)
            assert response.headers["www-authenticate"] == "Bearer"
            assert "not one of this server's" in response.text
    assert checked > 20
    assert all(submit.context.request_id.startswith("HEALTH_CHECK") for submit in guarded.double.submits)


@pytest.mark.parametrize("private", [False, True])
async def test_metrics_want_a_key_where_they_are_private(live: LiveServer, private: bool) -> None:
    settings = dataclasses.replace(live.state.settings, api_key=digest_of(KEYS[0]), private_metrics=private)
    live.state.settings, live.state.keys = settings, AccessKeys.of(settings)
    transport = httpx.ASGITransport(create(live.state), client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        answer = await http.get("/metrics")
        assert answer.status_code == (401 if private else 200)
        assert ("tokenyard_requests" in answer.text) is not private
        assert (await http.get("/metrics", headers=bearer("wrong"))).status_code == answer.status_code
        assert "tokenyard_requests" in (await http.get("/metrics", headers=bearer(KEYS[0]))).text
        assert (await http.get("/health")).status_code == 200


def test_private_metrics_want_a_server_with_keys() -> None:
    for settings in ({}, {"admin_api_key": ADMIN}):
        with pytest.raises(SettingsError, match=r"private_metrics must be used with api_key or api_key_file"):
            Settings(private_metrics=True, **settings)  # type: ignore[arg-type]
    assert Settings(private_metrics=True, api_key_file="keys").private_metrics


@pytest.mark.parametrize("key", [*KEYS, ADMIN])
@pytest.mark.parametrize("header", ["Authorization: Bearer ", "authorization: bearer ", "X-Api-Key: ", "api-key: "])
def test_each_key_opens_in_either_header(guarded: LiveServer, key: str, header: str) -> None:
    name, _, prefix = header.partition(": ")
    response = HTTP.post(guarded.url + "/v1/completions", json={"prompt": "x"}, headers={name: prefix + key})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer none", "x-api-key": KEYS[0]},
        {"authorization": "Bearer", "x-api-key": KEYS[0]},
        {"authorization": f"Basic {KEYS[1]}", "x-api-key": KEYS[0]},
        {"authorization": f"Bearer {KEYS[0]}", "x-api-key": "none"},
        {"x-api-key": "", "api-key": KEYS[0]},
        {"authorization": "Bearer none", "x-api-key": "none", "api-key": KEYS[0]},
    ],
)
def test_one_right_key_among_placeholders_opens(guarded: LiveServer, headers: dict[str, str]) -> None:
    assert HTTP.get(guarded.url + "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("users", [(), (digest_of(KEYS[0]),)])
def test_an_admin_key_counts_beside_another(guarded: LiveServer, users: tuple[str, ...]) -> None:
    guarded.state.keys = AccessKeys(users, (digest_of(ADMIN),))
    for first, second in ((ADMIN, KEYS[0]), (KEYS[0], ADMIN)):
        headers = {"authorization": f"Bearer {first}", "x-api-key": second}
        assert HTTP.post(guarded.url + "/flush_cache", headers=headers).status_code == 200


def test_no_more_than_a_few_keys_are_tried(guarded: LiveServer) -> None:
    many = [("api-key", f"none-{i}") for i in range(50)]
    assert HTTP.get(guarded.url + "/v1/models", headers=[*many, ("api-key", KEYS[0])]).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {KEYS[0]}"},
        {"authorization": KEYS[0]},
        {"x-api-key": KEYS[0][:-1]},
        {"x-api-key": KEYS[0] + "a"},
        {"x-api-key": digest_of(KEYS[0])},
        {"x-api-key": ""},
        {"api-key": f"Bearer {KEYS[0]}"},
        {"bearer": KEYS[0]},
    ],
)
def test_what_is_no_key_is_kept_out(guarded: LiveServer, headers: dict[str, str]) -> None:
    assert HTTP.post(guarded.url + "/generate", json={"inputs": "x"}, headers=headers).status_code == 401


def test_each_dialect_refuses_in_its_own_form(guarded: LiveServer) -> None:
    error = HTTP.post(guarded.url + "/v1/chat/completions").json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    found = HTTP.post(guarded.url + "/v1/messages").json()
    assert (found["type"], found["error"]["type"]) == ("error", "authentication_error")
    assert HTTP.get(guarded.url + "/info").json()["error_type"] == "unauthorized"
    found = HTTP.get(guarded.url + "/server_info").json()["error"]
    assert (found["type"], found["code"]) == ("authentication_error", 401)


def test_the_real_clients_see_an_authentication_error(guarded: LiveServer) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=guarded.url + "/v1", api_key="wrong").models.list()
    assert openai.OpenAI(base_url=guarded.url + "/v1", api_key=KEYS[1]).models.list().data
    ask = {"model": "tgi", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=guarded.url, api_key="wrong").messages.create(**ask)  # type: ignore[call-overload]
    answer = anthropic.Anthropic(base_url=guarded.url, api_key=KEYS[2]).messages.create(**ask)  # type: ignore[call-overload]
    assert answer.content


def test_operators_need_the_admin_key(guarded: LiveServer) -> None:
    assert HTTP.post(guarded.url + "/flush_cache", headers=bearer(KEYS[0])).status_code == 403
    assert not guarded.double.orders
    assert HTTP.post(guarded.url + "/flush_cache", headers=bearer(ADMIN)).status_code == 200
    far_away = bearer(ADMIN) | {"x-forwarded-for": "203.0.113.7"}
    assert HTTP.post(guarded.url + "/flush_cache", headers=far_away).status_code == 200


def test_without_an_admin_key_operators_are_local_and_have_a_key(guarded: LiveServer) -> None:
    guarded.state.keys = AccessKeys((digest_of(KEYS[0]),))
    assert HTTP.post(guarded.url + "/flush_cache").status_code == 401
    assert HTTP.post(guarded.url + "/flush_cache", headers=bearer(KEYS[0])).status_code == 200
    far_away = bearer(KEYS[0]) | {"x-forwarded-for": "203.0.113.7"}
    assert HTTP.post(guarded.url + "/flush_cache", headers=far_away).status_code == 403


OPERATORS = ["/flush_cache", "/abort_request", "/pause_generation", "/continue_generation"]


def refusal(live: LiveServer, headers: list[tuple[str, str]], path: str = "/flush_cache") -> str:
    response = HTTP.post(live.url + path, json={"rid": "a"}, headers=headers)
    assert response.status_code == 403, response.text
    assert not live.double.orders
    message: str = response.json()["error"]["message"]
    assert "--admin-api-key" in message
    return message


@pytest.mark.parametrize("path", OPERATORS)
def test_operators_are_on_this_host(live: LiveServer, path: str) -> None:
    assert "you are at 203.0.113.9" in refusal(live, [("x-forwarded-for", "203.0.113.9")], path)
    assert HTTP.post(live.url + path, json={"rid": "a"}).status_code == 200
    assert live.double.orders


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Forwarded-For", "127.0.0.1"),
        ("X-Forwarded-For", ""),
        ("X-Forwarded-For", "unknown"),
        ("X-Forwarded-For", "127.0.0.1, 203.0.113.7:5555"),
        ("X-Forwarded-For", "2001:db8::7"),
        ("X-Forwarded-Proto", "https"),
        ("X-Forwarded", "for=127.0.0.1"),
        ("Forwarded", "for=203.0.113.7"),
        ("Forwarded", 'for="[::1]"'),
        ("X-Real-IP", "127.0.0.1"),
        ("Via", "1.1 cache"),
        ("CF-Connecting-IP", "203.0.113.7"),
        ("True-Client-IP", "203.0.113.7"),
        ("X-Envoy-External-Address", "203.0.113.7"),
    ],
)
def test_who_comes_through_a_proxy_is_no_operator(live: LiveServer, name: str, value: str) -> None:
    refusal(live, [(name, value)])
    refusal(live, [(name, value), (name, "127.0.0.1")])


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_server_that_others_can_reach_has_no_operators_without_a_key(live: LiveServer, host: str) -> None:
    live.state.settings = dataclasses.replace(live.state.settings, host=host)
    assert f"it listens on {host}" in refusal(live, [])
    live.state.keys = AccessKeys(admins=(digest_of(ADMIN),))
    assert HTTP.post(live.url + "/flush_cache", headers=bearer(ADMIN)).status_code == 200


async def test_the_forms_of_an_address_are_one(live: LiveServer) -> None:
    """A socket on `::` shows IPv4 peers in IPv6's clothes."""
    for client, reason in (("::ffff:10.0.0.7", "you are at ::ffff:10.0.0.7"), ("10.0.0.7", "you are at 10.0.0.7")):
        transport = httpx.ASGITransport(create(live.state), client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            response = await http.post("/flush_cache")
            assert (response.status_code, reason in response.text) == (403, True)


def test_plain_nginx_says_nothing_but_http_1_0(live: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2])), timeout=90) as connection:
        head = "POST /flush_cache HTTP/1.0\r\nHost: 127.0.0.1:8000\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 403")
    assert not live.double.orders


@pytest.mark.parametrize(
    "headers",
    [
        [("origin", "https://evil.example")],
        [("origin", "null")],
        [("origin", "http://[")],
        [("origin", "http://localhost:1")],
        [("sec-fetch-site", "cross-site")],
        [("sec-fetch-site", "same-site")],
        [("host", "evil.example")],
        [("host", "127.0.0.1.evil.example:80"), ("origin", "http://127.0.0.1.evil.example:80")],
        [("host", "")],
    ],
)
def test_a_web_page_of_another_site_is_no_operator(live: LiveServer, headers: list[tuple[str, str]]) -> None:
    refusal(live, headers)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]", "LOCALHOST:9"])
def test_our_own_page_and_tools_are(live: LiveServer, name: str) -> None:
    headers = {"host": name, "origin": f"http://{name}", "sec-fetch-site": "same-origin"}
    assert HTTP.post(live.url + "/flush_cache", headers=headers).status_code == 200
    assert HTTP.get(live.url + "/flush_cache", headers={"host": name, "sec-fetch-site": "none"}).status_code == 200


def test_refusals_are_counted(guarded: LiveServer) -> None:
    HTTP.post(guarded.url + "/v1/completions", json={"prompt": "x"})
    metrics = HTTP.get(guarded.url + "/metrics").text
    assert 'outcome="unauthorized",route="/v1/completions"} 1.0' in metrics
