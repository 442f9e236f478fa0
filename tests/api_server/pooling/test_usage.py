"""Texts that a model pools count for the key that sent them."""

from __future__ import annotations

import httpx

from shared.access_keys import AccessKeys, digest_of
from tests.api_server.pooling.conftest import PoolingServer


def test_texts_are_counted_and_limited(embedding: PoolingServer) -> None:
    state = embedding.live.state
    state.keys = AccessKeys((digest_of("sesame") + ";rpm=1",), (digest_of("boss"),))
    state.observers.append(state.accounts)
    state.accounts.rotate(state.keys)
    own = {"authorization": "Bearer sesame"}
    body = {"input": ["the fox", "Hello"]}
    answer = httpx.post(embedding.url + "/v1/embeddings", json=body, headers=own)
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert httpx.post(embedding.url + "/embed", json={"inputs": "x"}, headers=own).status_code == 429
    (use,) = httpx.get(embedding.url + "/usage", headers={"authorization": "Bearer boss"}).json()["usage"]
    assert (use["model"], use["requests"], use["generation_tokens"]) == ("tiny-embedder", 1, 0)
    assert use["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
