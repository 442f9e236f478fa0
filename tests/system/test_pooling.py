"""Vectors and scores over HTTP from real processes: equal to transformers', in order, with real clients."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
import torch
from huggingface_hub import InferenceClient
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from tests.api_server.pooling.conftest import PROMPTS
from tests.system.pooling_models import LONGEST, WIDTH, make_reranker
from tests.system.server import Server

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "hello", "world", "how", "are", "you", "today"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reranker(tmp_path_factory.mktemp("pooling") / "tiny-reranker")


@pytest.fixture(scope="module")
def reranking(reranker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(reranker, ["--dtype", "float32"], tmp_path_factory.mktemp("reranking") / "log") as running:
        yield running


def sentence(words: int) -> str:
    return " ".join(random.choices(WORDS, k=words))


def vectors(path: Path, texts: Sequence[str]) -> Any:
    """What transformers makes of each text alone: the mean of its states, with length 1."""
    model: Any = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = []
    with torch.inference_mode():
        for text in texts:
            inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=LONGEST)
            mean = model(**inputs).last_hidden_state[0].mean(0)
            rows.append((mean / mean.norm()).numpy())
    return np.stack(rows)


def logits(path: Path, pairs: Sequence[tuple[str, str]]) -> Any:
    model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    with torch.inference_mode():
        rows = [
            model(**tokenizer(*pair, return_tensors="pt", truncation="only_second", max_length=LONGEST)).logits[0]
            for pair in pairs
        ]
    return torch.stack(rows)[:, 0].numpy()


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


def test_openais_client_gets_transformers_vectors(embedding: Server, embedder: Path) -> None:
    texts = [sentence(random.randrange(1, 100)) for _ in range(70)]
    answer = client_of(embedding).embeddings.create(model="tiny-embedder", input=texts)
    found = np.array([item.embedding for item in answer.data])
    assert [item.index for item in answer.data] == list(range(70))
    assert np.abs(found - vectors(embedder, texts)).max() < 1e-5
    plain = client_of(embedding).embeddings.create(model="", input=texts, encoding_format="float")
    assert np.array([item.embedding for item in plain.data], np.float32).tobytes() == found.astype("<f4").tobytes()


def test_every_route_gives_the_same_vector(embedding: Server, embedder: Path) -> None:
    text = sentence(9)
    (expected,) = vectors(embedder, [text])
    post = embedding.post
    coded = post("/v1/embeddings", {"input": text, "encoding_format": "base64"})["data"][0]["embedding"]
    found = [
        np.frombuffer(base64.b64decode(coded), "<f4"),
        post("/embed", {"inputs": text})[0],
        post("/", {"inputs": text})[0],
        post("/invocations", {"inputs": [text]})[0],
        post("/encode", {"text": text})["embedding"],
        post("/pooling", {"input": text})["data"][0]["data"],
        InferenceClient(base_url=embedding.url).feature_extraction(text)[0],
    ]
    assert [np.abs(np.array(each) - expected).max() < 1e-5 for each in found] == [True] * len(found)


def test_cut_prompted_and_long(embedding: Server, embedder: Path) -> None:
    text = sentence(300)
    cut = embedding.post("/embed", {"inputs": [text], "truncate": True})
    assert np.abs(np.array(cut) - vectors(embedder, [text])).max() < 1e-5
    refused = httpx.post(embedding.url + "/v1/embeddings", json={"input": ["fox", text]})
    assert refused.status_code == 400
    assert f"input[1] has 302 tokens; this model takes at most {LONGEST}" in refused.json()["error"]["message"]
    prompted = embedding.post("/embed", {"inputs": "fox", "prompt_name": "query", "dimensions": 7})
    (whole,) = vectors(embedder, [PROMPTS["query"] + "fox"])
    assert np.abs(np.array(prompted[0]) - whole[:7] / np.linalg.norm(whole[:7])).max() < 1e-5


def test_tokens_and_similarity(embedding: Server, embedder: Path) -> None:
    texts = [sentence(n) for n in (3, 8, 5)]
    rows = embedding.post("/embed_all", {"inputs": texts})
    assert [np.array(each).shape for each in rows] == [(n + 2, WIDTH) for n in (3, 8, 5)]
    means = np.array([np.mean(each, axis=0) for each in rows])
    expected = vectors(embedder, texts)
    assert np.abs(means / np.linalg.norm(means, axis=1, keepdims=True) - expected).max() < 1e-5
    cosines = InferenceClient(base_url=embedding.url).sentence_similarity(texts[0], other_sentences=texts[1:])
    assert cosines == pytest.approx((expected[1:] @ expected[0]).tolist(), abs=1e-5)


def test_many_texts_while_others_ask(embedding: Server, embedder: Path) -> None:
    """2048 texts in one request come complete and in order, and 2049 are refused."""
    texts = [sentence(random.randrange(1, 12)) for _ in range(2048)]
    found: list[Any] = []
    bulk = threading.Thread(target=lambda: found.append(embedding.post("/embed", {"inputs": texts})))
    bulk.start()
    while bulk.is_alive():
        assert len(embedding.post("/embed", {"inputs": "fox"})[0]) == WIDTH
    bulk.join()
    picked = random.sample(range(2048), 40)
    assert np.abs(np.array(found[0])[picked] - vectors(embedder, [texts[i] for i in picked])).max() < 1e-5
    refused = httpx.post(embedding.url + "/v1/embeddings", json={"input": ["fox"] * 2049})
    assert refused.status_code == 400
    assert "at most 2048" in refused.json()["error"]["message"]


def test_a_client_that_leaves_costs_nothing_more(embedding: Server) -> None:
    before = embedding.metrics("tokenyard_requests_total")
    tokens = sum(embedding.metrics("tokenyard_prompt_tokens_total").values())
    body = json.dumps({"inputs": [[5] * 120] * 2048})
    connection = http.client.HTTPConnection("127.0.0.1", embedding.port, timeout=60)
    # It stands still, or the texts might all be computed before their client leaves.
    worker = embedding.child("model_worker")
    worker.suspend()
    try:
        connection.request("POST", "/embed", body, {"Content-Type": "application/json"})
        embedding.wait_for(
            "its texts being there",
            60,
            lambda: sum(embedding.metrics("tokenyard_prompt_tokens_total").values()) >= tokens + 2048 * 120,
        )
        connection.close()
        name = '{outcome="cancelled",route="/embed"}'
        embedding.wait_for(
            "the cancelled request in the metrics",
            60,
            lambda: embedding.metrics("tokenyard_requests_total").get(name, 0) > before.get(name, 0),
        )
    finally:
        # A machine that is too slow has lost it by now: the scheduler ends workers that are silent.
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.resume()
    embedding.wait_for(
        "nothing of it runs", 60, lambda: not sum(embedding.metrics("tokenyard_requests_running").values())
    )
    embedding.post("/embed", {"inputs": "fox"})


def test_the_killed_worker_is_not_noticed(embedding: Server, embedder: Path) -> None:
    texts = [sentence(random.randrange(20, 90)) for _ in range(1024)]
    found: list[Any] = []
    bulk = threading.Thread(target=lambda: found.append(embedding.post("/embed", {"inputs": texts})))
    bulk.start()
    time.sleep(0.1)
    embedding.child("model_worker").kill()
    bulk.join(60)
    assert np.array(found[0]).shape == (1024, WIDTH)
    assert np.abs(np.array(found[0])[-20:] - vectors(embedder, texts[-20:])).max() < 1e-5


def test_rerankers_scores(reranking: Server, reranker: Path) -> None:
    query = sentence(4)
    documents = [sentence(random.randrange(1, 200)) for _ in range(20)]
    expected = logits(reranker, [(query, document) for document in documents])
    best = np.argsort(-expected, kind="stable").tolist()
    probabilities = 1 / (1 + np.exp(-expected))
    ask = {"model": "tiny-reranker", "query": query, "documents": documents}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = reranking.post(path, ask)["results"]
        assert [item["index"] for item in results] == best
        assert [item["relevance_score"] for item in results] == pytest.approx(probabilities[best].tolist(), abs=1e-5)
    raw = reranking.post("/rerank", {"query": query, "texts": documents, "truncate": True, "raw_scores": True})
    assert [item["score"] for item in raw] == pytest.approx(expected[best].tolist(), abs=1e-4)
    short = [document for document in documents if len(document.split()) < 100]
    score = reranking.post("/score", {"text_1": query, "text_2": short})["data"]
    wanted = [float(probabilities[documents.index(document)]) for document in short]
    assert [item["score"] for item in score] == pytest.approx(wanted, abs=1e-5)
    assert [item["score"] for item in reranking.post("/v1/rerank", {"query": query, "documents": short})] == (
        pytest.approx(sorted(wanted, reverse=True), abs=1e-5)
    )
    label = reranking.post("/predict", {"inputs": [[query, short[0]]]})[0]
    assert label == [{"label": "LABEL_0", "score": pytest.approx(wanted[0], abs=1e-5)}]


def test_wrong_routes_name_the_remedy(reranking: Server) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/embeddings", {"input": "x"}),
        ("/generate", {"inputs": "x"}),
    ):
        refused = httpx.post(reranking.url + path, json=body)
        assert refused.status_code == 400
        assert "start a server with --task" in refused.text
    assert httpx.get(reranking.url + "/v1/models").json()["data"][0]["task"] == "rerank"
    assert httpx.get(reranking.url + "/health_generate").status_code == 200
