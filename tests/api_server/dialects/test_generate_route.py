"""Which dialect a body is, on every path that two dialects share; and that no body at all is answered with a 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api_server.dialects.generate_route import dialect_of
from api_server.dialects.sglang.schema import SamplingParameters
from api_server.dialects.tgi.schema import GenerateParameters
from tests.api_server.conftest import LiveServer

NO_INPUT = "Either text, input_ids or input_embeds should be provided."


@pytest.mark.parametrize(
    ("body", "dialect"),
    [
        ({"inputs": "a"}, "tgi"),
        ({"inputs": None}, "tgi"),
        ({"inputs": "a", "text": None}, "tgi"),
        ({"inputs": "a", "sampling_params": {}}, "tgi"),
        ({"text": "a"}, "sglang"),
        ({"text": ""}, "sglang"),
        ({"input_ids": [1]}, "sglang"),
        ({"input_embeds": [[0.5]]}, "sglang"),
        ({"text": "a", "parameters": {}}, "sglang"),
        ({"inputs": "a", "text": "a"}, "both"),
        ({"inputs": None, "input_ids": [1]}, "both"),
        ({}, "neither"),
        ({"text": None}, "neither"),
        ({"parameters": {}}, "neither"),
        ({"messages": []}, "neither"),
    ],
)
def test_keys_select_the_dialect(body: dict[str, Any], dialect: str) -> None:
    assert dialect_of(body) == dialect


def _shape(response: httpx.Response) -> str:
    """Which dialect an answer speaks."""
    if response.headers["content-type"].startswith("text/event-stream"):
        return "sglang stream" if response.text.endswith("data: [DONE]\n\n") else "tgi stream"
    body = response.json()
    if response.status_code != 200:
        return "tgi error" if isinstance(body["error"], str) else "sglang error"
    first = body[0] if isinstance(body, list) else body
    kind = "tgi" if "generated_text" in first else "sglang"
    return f"{kind} list" if isinstance(body, list) else kind


TABLE: list[tuple[str, dict[str, Any], int, str]] = [
    ("/generate", {"inputs": "a"}, 200, "tgi"),
    ("/generate", {"inputs": "a", "stream": True}, 200, "tgi"),
    ("/generate", {"text": "a"}, 200, "sglang"),
    ("/generate", {"text": ["a"]}, 200, "sglang list"),
    ("/generate", {"text": "a", "stream": True}, 200, "sglang stream"),
    ("/generate_stream", {"inputs": "a"}, 200, "tgi stream"),
    ("/generate_stream", {"text": "a"}, 200, "sglang stream"),
    ("/generate_stream", {"text": "a", "stream": False}, 200, "sglang stream"),
    ("/", {"inputs": "a"}, 200, "tgi list"),
    ("/", {"inputs": "a", "stream": True}, 200, "tgi stream"),
    ("/", {"text": "a"}, 200, "sglang"),
    ("/", {"text": "a", "stream": True}, 200, "sglang stream"),
    ("/generate", {}, 400, "sglang error"),
    ("/generate", {"text": None}, 400, "sglang error"),
]

SAME_EVERYWHERE: list[tuple[dict[str, Any], int, str]] = [
    ({"inputs": "a", "text": "b"}, 422, "tgi error"),
    ({"inputs": 3}, 422, "tgi error"),
    ({"text": 3}, 400, "sglang error"),
    ({"parameters": {}}, 422, "tgi error"),
]


def test_dispatch_table(live: LiveServer) -> None:
    everywhere = [(path, *row) for path in ("/generate", "/generate_stream", "/") for row in SAME_EVERYWHERE]
    for path, body, status, shape in TABLE + everywhere:
        response = httpx.post(live.url + path, json=body)
        assert (response.status_code, _shape(response)) == (status, shape), (path, body, response.text)


def test_words_of_the_ambiguous_and_the_empty(live: LiveServer) -> None:
    both = httpx.post(live.url + "/generate", json={"inputs": "a", "text": "b", "input_ids": [1]}).json()
    assert both["error_type"] == "validation"
    assert both["error"].startswith("Input validation error: ")
    assert all(word in both["error"] for word in ("both", "`inputs`", "`text`", "`input_ids`"))
    assert httpx.post(live.url + "/generate", json={}).json()["error"]["message"] == NO_INPUT
    assert "missing field `inputs`" in httpx.post(live.url + "/generate", json={"parameters": {}}).json()["error"]


def test_methods(live: LiveServer) -> None:
    assert httpx.put(live.url + "/generate", json={"inputs": "a"}).status_code == 200
    assert httpx.get(live.url + "/generate").status_code == 405
    assert httpx.get(live.url + "/").status_code == 200


def test_tokenize_is_dispatched_too(live: LiveServer) -> None:
    for body, status, kind in [
        ({"inputs": "a"}, 200, list),
        ({"prompt": "a"}, 200, dict),
        ({"messages": [{"role": "user", "content": "a"}]}, 200, dict),
        ({"inputs": "a", "prompt": "a"}, 422, dict),
        ({}, 422, dict),
        ({"prompt": 3}, 400, dict),
    ]:
        response = httpx.post(live.url + "/tokenize", json=body)
        assert (response.status_code, type(response.json())) == (status, kind), body


def test_body_that_is_no_object(live: LiveServer) -> None:
    for content in (b"", b"null", b"[1]", b"{", b"\xff", b"[" * 5000, b'{"a": NaN}'):
        for path, shape in (("/generate", "sglang error"), ("/generate_stream", "tgi error"), ("/", "tgi error")):
            response = httpx.post(live.url + path, content=content)
            assert (response.status_code, _shape(response)) == (400, shape), content[:20]


def test_body_that_is_declared_to_be_something_else(live: LiveServer) -> None:
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/generate_stream",
        "/",
        "/generate",
        "/detokenize",
    ):
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            response = httpx.post(live.url + path, content=b"{}", headers={"content-type": kind})
            assert (response.status_code, kind in response.text) == (415, True), path
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/problem+json"):
        headers = {"content-type": kind}
        assert httpx.post(live.url + "/generate", content=b'{"text": "a"}', headers=headers).status_code == 200


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_tgi_names = sorted(GenerateParameters.model_fields)
_sampling_names = sorted(SamplingParameters.model_fields)
_small = st.integers(-3, 20) | st.sampled_from([0.5, 1.0, True, None, "a", ["a"], [1]]) | _json


def _subset(names: list[str], values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), values, max_size=3)


_instances = st.dictionaries(st.sampled_from(["inputs", "parameters", "messages"]), st.text(max_size=5) | _json)
_bodies = st.one_of(
    st.fixed_dictionaries({"inputs": st.text(max_size=9) | _json, "parameters": _subset(_tgi_names, _small) | _json}),
    st.fixed_dictionaries(
        {
            "text": st.text(max_size=9) | st.lists(st.text(max_size=3), max_size=3) | _json,
            "sampling_params": _subset(_sampling_names, _small)
            | st.lists(_subset(_sampling_names, _small), max_size=2),
        },
        optional={"return_logprob": _json, "rid": _json, "stream": st.booleans()},
    ),
    st.fixed_dictionaries({"input_ids": st.lists(st.integers(-5, 700), max_size=5) | _json}),
    st.dictionaries(st.sampled_from(["inputs", "text", "input_ids", "parameters", "prompt", "messages"]), _json),
    st.fixed_dictionaries({"instances": st.lists(_instances, max_size=2) | _json}),
    st.fixed_dictionaries(
        {"tokens": st.lists(st.integers(-5, 700) | st.lists(st.integers(0, 500)), max_size=3) | _json}
    ),
    st.fixed_dictionaries({"rid": st.text(max_size=3) | _json}, optional={"abort_all": _json}),
)


@pytest.fixture
def client(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=90) as client:
        yield client


_FUZZED = [
    "/generate",
    "/generate_stream",
    "/",
    "/tokenize",
    "/invocations",
    "/vertex",
    "/detokenize",
    "/abort_request",
]


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=_bodies, path=st.sampled_from(_FUZZED))
def test_no_body_breaks_the_server(client: httpx.Client, body: dict[str, Any], path: str) -> None:
    response = client.post(path, content=json.dumps(body).encode("utf-8", "surrogatepass"))
    assert response.status_code in (200, 400, 422), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert len(message) > 10
        assert "internal" not in message
    elif response.headers.get("content-type", "").startswith("text/event-stream"):
        assert '"error"' not in response.text
