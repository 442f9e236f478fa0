"""Bodies that are wrong in random ways, for servers whose models score, classify, or weigh words: each is answered."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.api_server.pooling.conftest import PoolingServer, Serve
from tests.strange_bodies import REFUSALS, body, check_error, properties
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
    seed = random.getrandbits(31)
    rng = random.Random(seed)
    answered: Counter[int] = Counter()
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        document = client.get("/openapi.json").json()
        for path in paths:
            content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
            examples = [example["value"] for example in content["examples"].values()]
            names = sorted(set(properties(document, content["schema"])))
            for example in examples:
                answered[client.post(path, json=example).status_code] += 1
            for _ in range(BODIES):
                sent = body(rng, examples, names)
                response = client.post(path, content=sent, headers={"content-type": "application/json"})
                answered[response.status_code] += 1
                where = f"seed {seed}, {path}, {sent[:300]!r}"
                assert response.status_code in REFUSALS | {200}, (where, response.text[:500])
                if response.status_code != 200:
                    check_error(path, response)
    assert answered[200] > 0
    assert answered[400] + answered[422] > BODIES, answered
