"""Who gets in: every route, every dialect's 401, the operator's routes, and what the server tells of its keys."""

from __future__ import annotations

import secrets

import anthropic
import httpx
import openai
import pytest
from starlette.routing import Route

from api_server.access import PUBLIC_PATHS
from api_server.app import create
from shared.access_keys import AccessKeys, digest_of
from tests.api_server.conftest import LiveServer

HTTP = httpx.Client(timeout=20)
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
            public = route.path in PUBLIC_PATHS or (route.path, method) == ("/", "GET")
            response = HTTP.request(method, guarded.url + route.path, headers=bearer("wrong"))
            if public:
                assert response.status_code in (200, 503), route.path
                continue
            checked += 1
            assert response.status_code == 401, (method, route.path)
            assert response.headers["www-authenticate"] == "Bearer"
            assert "not one of this server's" in response.text
    assert checked > 20
    assert all(submit.context.request_id.startswith("HEALTH_CHECK") for submit in guarded.double.submits)


@pytest.mark.parametrize("key", [*KEYS, ADMIN])
@pytest.mark.parametrize("header", ["Authorization: Bearer ", "authorization: bearer ", "X-Api-Key: "])
def test_each_key_opens_in_either_header(guarded: LiveServer, key: str, header: str) -> None:
    name, _, prefix = header.partition(": ")
    response = HTTP.post(guarded.url + "/v1/completions", json={"prompt": "x"}, headers={name: prefix + key})
    assert response.status_code == 200


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


def test_refusals_are_counted(guarded: LiveServer) -> None:
    HTTP.post(guarded.url + "/v1/completions", json={"prompt": "x"})
    metrics = HTTP.get(guarded.url + "/metrics").text
    assert 'outcome="invalid",route="/v1/completions"} 1.0' in metrics
