"""Bodies that are wrong in random ways, and bodies that schemathesis makes, to a server of a model that pools."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from schemathesis import GenerationMode

from tests.strange_bodies import check_error, send_to_every_route
from tests.system.fuzz import LONG, PAUSES
from tests.system.server import Server
from tests.system.test_contract import check_all
from tests.system.test_malformed import SECONDS

# Bodies for each route.
BODIES = LONG or 25


@pytest.fixture(scope="module")
def target(embedding: Server) -> Iterator[Server]:
    """The same processes answer the same before and after all that is sent."""
    before = pids(embedding), embedding.post("/embed", {"inputs": "the fox"})
    yield embedding
    assert (pids(embedding), embedding.post("/embed", {"inputs": "the fox"})) == before


def pids(server: Server) -> list[int]:
    return sorted(child.pid for child in server.children())


@pytest.fixture(scope="module")
def document(target: Server) -> dict[str, Any]:
    with urllib.request.urlopen(target.url + "/openapi.json", timeout=90) as response:
        found: dict[str, Any] = json.load(response)
    # What this model cannot do, and what operators do, is sent by other tests.
    kept = ("/v1/embeddings", "/embed", "/embed_all", "/similarity", "/rerank", "/v1/rerank", "/score", "/pooling", "/")
    found["paths"] = {path: found["paths"][path] for path in (*kept, "/encode")}
    return found


def test_every_malformed_body_gets_an_answer(target: Server, document: dict[str, Any]) -> None:
    assert not set(PAUSES) & set(document["paths"])
    with httpx.Client(base_url=target.url, timeout=SECONDS) as client:
        answered = send_to_every_route(client, document, BODIES)
    assert answered[200] > 0
    assert answered[400] + answered[422] > BODIES, answered


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_our_document(target: Server, document: dict[str, Any], mode: GenerationMode) -> None:
    answered = check_all(document, mode, target, frozenset({400, 413, 422}))
    assert answered[200] > 0 if mode is GenerationMode.POSITIVE else answered[400] + answered[422] > 0


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed", "/similarity", "/score", "/encode"])
def test_a_text_beyond_all_bounds_is_refused(target: Server, path: str) -> None:
    text = "a b" * (10 << 18)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": ["x", text]},
        "/embed": {"inputs": text},
        "/similarity": {"inputs": {"source_sentence": text, "sentences": ["x"]}},
        "/score": {"text_1": ["x", text], "text_2": ["x", "y"]},
        "/encode": {"text": text},
    }
    response = httpx.post(target.url + path, json=bodies[path], timeout=SECONDS)
    assert response.status_code in (400, 422), response.text[:500]
    check_error(path, response)
    assert "at most" in response.text
