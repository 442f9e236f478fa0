"""Time limits and priorities: in headers and bodies, in every dialect, and who may hurry."""

from __future__ import annotations

import secrets
from typing import Any

import httpx
import pytest

from interfaces.messages import SchedulingOptions, Submit
from interfaces.result.results import ErrorCode, RequestError
from shared.access_keys import AccessKeys, digest_of
from tests.api_server.conftest import LiveServer

HTTP = httpx.Client(timeout=90)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"model": "tgi", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
    "/generate": {"inputs": "x"},
    "/generate_stream": {"inputs": "x"},
    "/invocations": {"text": "x"},
    "/": {"inputs": "x", "stream": True},
}


def scheduling(live: LiveServer) -> SchedulingOptions:
    last: Submit = live.double.submits[-1]
    return last.scheduling


@pytest.mark.parametrize("path", BODIES)
def test_the_scheduler_is_told_in_every_dialect(live: LiveServer, path: str) -> None:
    body = BODIES[path] | {"timeout": 7.5, "queue_timeout": 2, "priority": 3, "deterministic": True}
    assert HTTP.post(live.url + path, json=body).status_code == 200
    told = scheduling(live)
    assert told.total_seconds == pytest.approx(7.5, abs=1)
    assert told.queue_seconds == pytest.approx(2, abs=1)
    assert (told.priority, told.tenant, told.deterministic) == (3, "", True)


def test_headers_say_the_same_and_the_body_wins(live: LiveServer) -> None:
    headers = {"x-request-timeout": "9", "x-queue-timeout": "0.5", "x-request-priority": "-2", "x-deterministic": "1"}
    HTTP.post(live.url + "/v1/completions", json={"prompt": "x", "queue_timeout": 4}, headers=headers)
    told = scheduling(live)
    assert told.total_seconds == pytest.approx(9, abs=1)
    assert told.queue_seconds == pytest.approx(4, abs=1)
    assert (told.priority, told.deterministic) == (-2, True)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"timeout": 0}, {}),
        ({"timeout": -1}, {}),
        ({"timeout": "soon"}, {}),
        ({"timeout": True}, {}),
        ({"timeout": [1]}, {}),
        ({"timeout": 1e9}, {}),
        ({"priority": 0.5}, {}),
        ({"priority": 2000}, {}),
        ({"deterministic": "yes"}, {}),
        ({"deterministic": 1}, {}),
        ({}, {"x-deterministic": "perhaps"}),
        ({}, {"x-queue-timeout": "nan"}),
        ({}, {"x-request-priority": "high"}),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    live: LiveServer, body: dict[str, Any], headers: dict[str, str]
) -> None:
    response = HTTP.post(live.url + "/v1/completions", json={"prompt": "x"} | body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter([*body, *headers]))
    assert not live.double.submits


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/v1/completions", 504, '"code":"timeout"'),
        ("/v1/messages", 504, '"type":"timeout_error"'),
        ("/generate", 504, '"error_type":"timeout"'),
        ("/invocations", 504, '"type":"timeout_error"'),
    ],
)
def test_a_request_that_ran_out_of_time_is_told_so(live: LiveServer, path: str, status: int, words: str) -> None:
    live.double.refuse = RequestError(ErrorCode.TIMEOUT, "the request has not ended within its time limit of 5 s")
    response = HTTP.post(live.url + path, json=BODIES[path] | {"timeout": 5})
    assert response.status_code == status
    assert words in response.text.replace(" ", "")
    assert "time limit of 5 s" in response.text


def test_with_keys_only_the_admin_may_hurry_and_keys_are_tenants(live: LiveServer) -> None:
    user, boss = secrets.token_urlsafe(), secrets.token_urlsafe()
    live.state.keys = AccessKeys((digest_of(user) + "*5",), (digest_of(boss),))
    body = {"prompt": "x", "priority": 1}
    refused = HTTP.post(live.url + "/v1/completions", json=body, headers={"x-api-key": user})
    assert refused.status_code == 400
    assert "needs the admin key" in refused.text
    assert HTTP.post(live.url + "/v1/completions", json=body, headers={"x-api-key": boss}).status_code == 200
    assert scheduling(live).priority == 1
    late = HTTP.post(live.url + "/v1/completions", json=body | {"priority": -1}, headers={"x-api-key": user})
    assert late.status_code == 200
    assert (scheduling(live).priority, scheduling(live).weight) == (-1, 5)
    assert scheduling(live).tenant == f"key-{digest_of(user).removeprefix('sha256:')[:8]}"
