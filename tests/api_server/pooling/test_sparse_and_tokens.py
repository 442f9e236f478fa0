"""Sparse vectors, and the labels of tokens, over HTTP on the scheduler double: each value beside its word or token."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.api_server.pooling.conftest import LABELS, PoolingServer, Serve, activated, checkpoint, vector_of

TEXTS = ["the fox", "fox fox the"]


@pytest.fixture
def sparse(serve: Serve, tmp_path: Path) -> Iterator[PoolingServer]:
    folder = checkpoint(tmp_path / "tiny-splade", "BertForMaskedLM")
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "SparseEncoder"}))
    with serve(folder, tasks=["sparse"]) as server:
        yield server


@pytest.fixture
def tagging(serve: Serve, tmp_path: Path) -> Iterator[PoolingServer]:
    folder = checkpoint(tmp_path / "tiny-tagger", "BertForTokenClassification", id2label=dict(enumerate(LABELS)))
    with serve(folder, tasks=["classify_tokens"], labels=LABELS) as server:
        yield server


def post(server: PoolingServer, path: str, **body: object) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=90)


@pytest.mark.parametrize("path", ["/embed_sparse", "/", "/invocations"])
def test_sparse_vectors_are_words_with_their_weights(sparse: PoolingServer, path: str) -> None:
    answer = post(sparse, path, inputs=TEXTS).json()
    for text, items in zip(TEXTS, answer, strict=True):
        assert items == [{"index": token, "value": 0.5} for token in sorted(set(sparse.ids(text)))]
    assert post(sparse, path, inputs=TEXTS[0]).json() == answer[:1]


def test_sparse_vectors_have_no_other_form(sparse: PoolingServer) -> None:
    for path, field in (("/pooling", "input"), ("/v1/embeddings", "input"), ("/embed", "inputs")):
        response = post(sparse, path, **{field: "fox"})
        assert response.status_code == 400
        assert "/embed_sparse" in response.text


@pytest.mark.parametrize("activate", [True, False])
def test_labels_of_tokens_are_rows_of_each_text(tagging: PoolingServer, activate: bool) -> None:
    answer = post(tagging, "/pooling", input=TEXTS, use_activation=activate).json()
    ids = [tagging.ids(text) for text in TEXTS]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    for i, (item, tokens) in enumerate(zip(answer["data"], ids, strict=True)):
        assert (item["index"], item["object"]) == (i, "pooling")
        logits = [vector_of(np.array([token], np.int32), len(LABELS)) for token in tokens]
        wanted = [activated(row) if activate else row for row in logits]
        assert item["data"] == [pytest.approx(row.tolist(), rel=1e-5) for row in wanted]


def test_labels_of_tokens_in_base64_are_the_same_numbers(tagging: PoolingServer) -> None:
    plain, coded = (
        post(tagging, "/pooling", input="the fox", encoding_format=form).json()["data"][0]["data"]
        for form in ("float", "base64")
    )
    numbers = np.frombuffer(base64.b64decode(coded), "<f4").reshape(-1, len(LABELS))
    assert np.array(plain, np.float32).tolist() == numbers.tolist()


def test_a_model_that_labels_tokens_labels_no_texts(tagging: PoolingServer) -> None:
    for path, body in (("/classify", {"input": "fox"}), ("/predict", {"inputs": "fox"})):
        response = post(tagging, path, **body)
        assert response.status_code in (400, 422)
        assert "/pooling" in response.text
