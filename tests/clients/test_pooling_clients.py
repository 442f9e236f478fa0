"""Clients that want vectors and ranks of texts, against one server of the embedded model with `--task embed`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import cohere
import litellm
import openai
import pytest
from huggingface_hub import InferenceClient
from langchain_openai import OpenAIEmbeddings

from tests.clients.conftest import SERVER_PYTHON
from tests.clients.questions import MODEL
from tests.system.server import Server

TEXTS = ["A switchyard sorts cars into trains.", "An apple is a fruit.", "Trains are made of cars."]
QUERY = "What is a train?"


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(None, ["--task", "embed"], tmp_path_factory.mktemp("embed") / "log", python=SERVER_PYTHON) as running:
        yield running


@pytest.fixture(scope="module")
def vectors(embedding: Server) -> list[list[float]]:
    client = openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="none", max_retries=0)
    answer = client.embeddings.create(model=MODEL, input=[*TEXTS, QUERY])
    return [item.embedding for item in answer.data]


def cosines(vectors: list[list[float]]) -> list[float]:
    """Those of the texts with the query."""
    return [sum(a * b for a, b in zip(vector, vectors[-1], strict=True)) for vector in vectors[:-1]]


def near(expected: Any) -> Any:
    return pytest.approx(expected, abs=1e-5)


def test_openai(embedding: Server, vectors: list[list[float]]) -> None:
    assert [math.sqrt(sum(value * value for value in vector)) for vector in vectors] == near([1.0] * 4)
    client = openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="none", max_retries=0)
    plain = client.embeddings.create(model=MODEL, input=TEXTS[1], encoding_format="float", dimensions=16).data[0]
    length = math.sqrt(sum(value * value for value in vectors[1][:16]))
    assert plain.embedding == near([value / length for value in vectors[1][:16]])
    with pytest.raises(openai.BadRequestError, match=r"--task generate"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": QUERY}])


def test_huggingface_hub(embedding: Server, vectors: list[list[float]]) -> None:
    client = InferenceClient(base_url=embedding.url, timeout=60)
    assert client.sentence_similarity(QUERY, other_sentences=TEXTS) == near(cosines(vectors))


def test_langchain(embedding: Server, vectors: list[list[float]]) -> None:
    found = OpenAIEmbeddings(
        model=MODEL, base_url=f"{embedding.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    assert found.embed_documents(TEXTS) == [near(vector) for vector in vectors[:-1]]
    assert found.embed_query(QUERY) == near(vectors[-1])


def test_litellm(embedding: Server, vectors: list[list[float]]) -> None:
    name = f"hosted_vllm/{MODEL}"
    answer = litellm.embedding(model=f"openai/{MODEL}", input=TEXTS, api_base=f"{embedding.url}/v1", api_key="none")
    assert [item["embedding"] for item in answer.data] == [near(vector) for vector in vectors[:-1]]
    ranked = litellm.rerank(
        model=name, query=QUERY, documents=list(TEXTS), top_n=2, api_base=embedding.url, api_key="none"
    )
    scores = {item["index"]: item["relevance_score"] for item in ranked.results}
    best = sorted(range(3), key=lambda i: -cosines(vectors)[i])[:2]
    assert list(scores) == best
    assert list(scores.values()) == near([cosines(vectors)[i] for i in best])


@pytest.mark.parametrize("version", [cohere.Client, cohere.ClientV2])
def test_cohere(embedding: Server, vectors: list[list[float]], version: Any) -> None:
    client = version(api_key="none", base_url=embedding.url)
    answer = client.rerank(model=MODEL, query=QUERY, documents=TEXTS, top_n=3)
    best = sorted(range(3), key=lambda i: -cosines(vectors)[i])
    assert [item.index for item in answer.results] == best
    assert [item.relevance_score for item in answer.results] == near([cosines(vectors)[i] for i in best])
    with pytest.raises(cohere.core.ApiError) as refused:
        client.rerank(model=MODEL, query=QUERY, documents=["x"] * 2049)
    assert "at most 2048" in str(refused.value.body)
