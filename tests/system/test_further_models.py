"""One server with a chat model, an embedder and a reranker: real processes, real models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from tests.api_server.pooling.conftest import save_tokenizer
from tests.one_shot.server import VOCAB, reference, tiny_bert
from tests.system.served_model import make_model
from tests.system.server import Server

TEXTS = ["the quick brown fox", "def f(x): return x + 1", "Hello"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_bert(tmp_path_factory.mktemp("embedder"))
    save_tokenizer(path, 160, VOCAB)
    return path


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reranker")
    torch.manual_seed(6)
    sizes: dict[str, Any] = {
        "num_labels": 1,
        "vocab_size": 600,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = BertConfig(**sizes, intermediate_size=48, max_position_embeddings=160)
    BertForSequenceClassification(config).eval().save_pretrained(path)
    save_tokenizer(path, 160)
    return path


@pytest.fixture(scope="module")
def server(embedder: Path, reranker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    flags = ["--served-model-name", "chat", "--also", f"embed={embedder}", "--also", f"rerank={reranker}"]
    with Server(make_model(folder / "chat"), [*flags, "--devices", "cpu"], folder / "log") as server:
        yield server


def post(server: Server, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def test_all_models_are_listed(server: Server) -> None:
    names = ["chat", "embed", "rerank"]
    assert [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]] == names
    anthropics = httpx.get(f"{server.url}/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [model["id"] for model in anthropics["data"]] == names
    assert (anthropics["first_id"], anthropics["last_id"]) == ("chat", "rerank")
    assert httpx.get(f"{server.url}/v1/models/embed").json()["max_model_len"] == 160
    assert httpx.get(f"{server.url}/v1/models/nope").status_code == 404


def test_each_request_is_answered_by_the_model_that_it_names(server: Server, embedder: Path) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    chat = post(server, "/v1/chat/completions", model="chat", messages=messages, max_tokens=5).json()
    assert (chat["model"], chat["usage"]["completion_tokens"]) == ("chat", 5)
    tokenizer = AutoTokenizer.from_pretrained(embedder)
    ids = [[token % 200 for token in tokenizer(text)["input_ids"]] for text in TEXTS]
    answer = post(server, "/v1/embeddings", model="embed", input=ids).json()
    assert answer["model"] == "embed"
    found = np.array([item["embedding"] for item in answer["data"]], np.float32)
    np.testing.assert_allclose(found, reference(embedder, [np.array(i, np.int32) for i in ids]), atol=2e-5)
    ranked = post(server, "/v1/rerank", model="rerank", query="Hello", documents=TEXTS).json()
    assert sorted(item["index"] for item in ranked["results"]) == [0, 1, 2]


def test_a_request_without_a_model_is_for_the_first_that_can_do_it(server: Server) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    assert post(server, "/v1/chat/completions", messages=messages, max_tokens=2).json()["model"] == "chat"
    found = post(server, "/v1/embeddings", input=[5, 6, 7])
    assert found.status_code == 200, found.text
    assert found.json()["model"] == "embed"


def test_a_wrong_name_and_a_wrong_task_are_refused(server: Server) -> None:
    unknown = post(server, "/v1/embeddings", model="nope", input="Hello")
    assert unknown.status_code == 404
    assert "this server has 'chat', 'embed', 'rerank'" in unknown.text
    for path, model, body in (
        ("/v1/embeddings", "chat", {"input": "Hello"}),
        ("/v1/chat/completions", "embed", {"messages": [{"role": "user", "content": "Hello!"}]}),
    ):
        refused = post(server, path, model=model, **body)
        assert refused.status_code == 400, refused.text
        assert f"'{model}'" in refused.text


def test_the_death_of_one_models_worker_is_that_models_alone(server: Server) -> None:
    workers = [child for child in server.children() if "also0" in " ".join(child.cmdline()) and is_worker(child)]
    assert workers
    for worker in workers:
        worker.kill()
    messages = [{"role": "user", "content": "Hello!"}]
    assert post(server, "/v1/chat/completions", model="chat", messages=messages, max_tokens=2).status_code == 200
    assert post(server, "/v1/embeddings", model="embed", input=[5, 6, 7]).status_code == 200
    server.wait_for("all models", 60, server.is_ready)


def is_worker(process: psutil.Process) -> bool:
    return "-m model_worker --" in " ".join(process.cmdline())
