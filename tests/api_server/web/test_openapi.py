"""The OpenAPI document: valid, complete, and its examples work against the server that publishes it."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from tests.api_server.conftest import LiveServer


@pytest.fixture
def published(live: LiveServer) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(live.url + "/openapi.json").json()
    return found


def test_document_is_valid(published: dict[str, Any]) -> None:
    assert published["openapi"] == "3.1.0"
    assert list(OpenAPIV31SpecValidator(published).iter_errors()) == []
    references = set(re.findall(r"'\$ref': '#/components/schemas/([^']+)'", repr(published)))
    assert references
    assert references <= set(published["components"]["schemas"])
    identifiers = [operation["operationId"] for path in published["paths"].values() for operation in path.values()]
    assert len(identifiers) == len(set(identifiers))


def test_every_route_is_in_it(published: dict[str, Any]) -> None:
    routes = {(method, path) for path, methods in published["paths"].items() for method in methods}
    expected = {
        ("post", "/generate"),
        ("put", "/generate"),
        ("post", "/generate_stream"),
        ("post", "/"),
        ("post", "/tokenize"),
        ("get", "/info"),
        ("post", "/chat_tokenize"),
        ("post", "/invocations"),
        ("post", "/vertex"),
        ("get", "/ping"),
        ("get", "/health_generate"),
        ("get", "/flush_cache"),
        ("post", "/flush_cache"),
        ("post", "/abort_request"),
        ("post", "/pause_generation"),
        ("post", "/continue_generation"),
        ("post", "/detokenize"),
        ("get", "/v1/loads"),
        ("post", "/v1/score"),
        ("get", "/health"),
        ("get", "/metrics"),
        ("get", "/live"),
        ("get", "/live/requests"),
        ("get", "/live/requests/{request_id}"),
        ("post", "/v1/chat/completions"),
        ("post", "/v1/completions"),
        ("post", "/v1/responses"),
        ("post", "/v1/messages"),
        ("post", "/v1/messages/count_tokens"),
        ("get", "/v1/files"),
        ("post", "/v1/files"),
        ("get", "/v1/models"),
        ("get", "/v1/models/{model}"),
        ("get", "/v2/health/ready"),
        ("post", "/v2/models/{model}/infer"),
        ("post", "/v2/models/{model}/versions/{version}/infer"),
        ("post", "/api/chat"),
        ("post", "/api/generate"),
        ("post", "/api/show"),
        ("get", "/api/tags"),
    }
    assert expected <= routes


def test_shared_paths_offer_each_dialects_body(published: dict[str, Any]) -> None:
    operation = published["paths"]["/generate"]["post"]
    content = operation["requestBody"]["content"]["application/json"]
    assert [s["$ref"].rpartition("/")[2] for s in content["schema"]["anyOf"]] == [
        "sglang.GenerateRequest",
        "tgi.GenerateRequest",
    ]
    assert set(content["examples"]) == {"sglang", "tgi"}
    assert "text/event-stream" in operation["responses"]["200"]["content"]
    assert published["components"]["schemas"]["tgi.GenerateRequest"]["required"] == ["inputs"]


def test_examples_work(live: LiveServer, published: dict[str, Any]) -> None:
    sent = 0
    for path, methods in published["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            for example in body.get("examples", {}).values():
                response = httpx.request(method, live.url + path, json=example["value"], timeout=90)
                assert response.status_code == 200, (path, example, response.text)
                kind = response.headers.get("content-type", "").partition(";")[0]
                assert kind in operation["responses"]["200"].get("content", {"": "nothing"})
                sent += 1
    assert sent >= 24


def test_page_needs_nothing_from_elsewhere(live: LiveServer) -> None:
    response = httpx.get(live.url + "/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", response.text)
    assert not re.search(r"https?://|@import|url\(", response.text)
    assert httpx.get(live.url + "/api-doc/openapi.json").json() == httpx.get(live.url + "/openapi.json").json()
