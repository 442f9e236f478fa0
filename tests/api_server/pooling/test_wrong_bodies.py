"""Bodies that are wrong in random ways, for servers whose models score, classify, or weigh words: each is answered."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.api_server.pooling.conftest import PoolingServer, Serve
from tests.strange_bodies import send_to_every_route
from tests.system.test_malformed import SECONDS

# Bodies for each route.
BODIES = 40
# The routes of each server, by the fixture or the task of its model.
ROUTES = {
    "reranking": ("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/predict", "/pooling", "/"),
    "classifying": ("/classify", "/v1/classify", "/predict", "/pooling", "/"),
    "sparse": ("/embed_sparse", "/", "/pooling"),
}


@pytest.fixture
def server(request: pytest.FixtureRequest, serve: Serve) -> Iterator[PoolingServer]:
    if request.param == "sparse":
        with serve(request.getfixturevalue("embedder"), tasks=["embed", "sparse"]) as running:
            yield running
    else:
        yield request.getfixturevalue(request.param)


@pytest.mark.parametrize(("server", "paths"), ROUTES.items(), indirect=["server"], ids=ROUTES)
def test_every_wrong_body_gets_an_answer(server: PoolingServer, paths: tuple[str, ...]) -> None:
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        document = client.get("/openapi.json").json()
        document["paths"] = {path: document["paths"][path] for path in paths}
        answered = send_to_every_route(client, document, BODIES)
        for path in paths:
            content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
            for example in content["examples"].values():
                answered[client.post(path, json=example["value"]).status_code] += 1
    assert answered[200] > 0
    assert answered[400] + answered[422] > BODIES, answered
