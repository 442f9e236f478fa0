"""Ollama's routes for vectors, with its own client on the scheduler double."""

from __future__ import annotations

import httpx
import numpy as np
import ollama
import pytest

from tests.api_server.pooling.conftest import LIMIT, PoolingServer, vector_of
from tests.api_server.pooling.test_embeddings import unit


def test_the_client_gets_the_vectors(embedding: PoolingServer) -> None:
    client = ollama.Client(host=embedding.url)
    texts = ["the fox", "Hello, world!"]
    answer = client.embed(model="tiny-embedder:latest", input=texts)
    assert answer.model == "tiny-embedder"
    for text, vector in zip(texts, answer.embeddings, strict=True):
        assert list(vector) == pytest.approx(unit(embedding.ids(text)), abs=1e-6)
    assert answer.prompt_eval_count == sum(len(embedding.ids(text)) for text in texts)
    (cut,) = client.embed(model="tiny-embedder", input="the fox", dimensions=3).embeddings
    assert list(cut) == pytest.approx(unit(embedding.ids("the fox"), 3), abs=1e-6)
    old = client.embeddings(model="tiny-embedder", prompt="the fox").embedding
    assert list(old) == pytest.approx(vector_of(np.array(embedding.ids("the fox"), np.int32)).tolist(), rel=1e-6)
    assert list(client.embeddings(model="tiny-embedder", prompt="").embedding) == []
    assert client.show("tiny-embedder").capabilities == ["embedding"]


def test_a_long_text_is_cut_unless_the_client_forbids_it(embedding: PoolingServer) -> None:
    client = ollama.Client(host=embedding.url)
    text = "fox " * 2 * LIMIT
    assert client.embed(model="tiny-embedder", input=text).prompt_eval_count == LIMIT
    with pytest.raises(ollama.ResponseError, match="truncate: true") as refused:
        client.embed(model="tiny-embedder", input=text, truncate=False)
    assert refused.value.status_code == 400


def test_wrong_bodies_are_named(embedding: PoolingServer) -> None:
    for body, error in (({}, "input is missing"), ({"input": ["a", ""]}, "input[1] must not be empty")):
        response = httpx.post(embedding.url + "/api/embed", json=body)
        assert response.status_code == 400
        assert error in response.json()["error"]
    chat = httpx.post(embedding.url + "/api/chat", json={"messages": [{"role": "user", "content": "hi"}]})
    assert (chat.status_code, "--task generate" in chat.json()["error"]) == (400, True)
