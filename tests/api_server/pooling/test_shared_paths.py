"""Reranking, scoring and classification: each body is answered in its dialect, by scores that the model gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.api_server.conftest import LiveServer
from tests.api_server.pooling.conftest import (
    LABELS,
    LIMIT,
    PROMPTS,
    PoolingServer,
    Serve,
    activated,
    checkpoint,
    vector_of,
)

DOCUMENTS = ["the fox jumps", "Hello, world!", "fox", "the quick brown fox"]


def post(server: PoolingServer | LiveServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=90)


def unit(tokens: list[int]) -> Any:
    vector = vector_of(np.array(tokens, np.int32))
    return vector / np.linalg.norm(vector)


def scores(server: PoolingServer, query: str, texts: list[str], raw: bool = False) -> list[float]:
    logits = [float(vector_of(np.array(server.ids(query, text), np.int32), 1)[0]) for text in texts]
    return logits if raw else [1 / (1 + np.exp(-logit)) for logit in logits]


def order(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -values[i])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_cohere_and_jina(reranking: PoolingServer, path: str) -> None:
    expected = scores(reranking, "fox?", DOCUMENTS)
    body = {"model": "tiny-reranker", "query": "fox?", "documents": [*DOCUMENTS[:3], {"text": DOCUMENTS[3]}]}
    answer = post(reranking, path, **body).json()
    best = order(expected)
    assert [item["index"] for item in answer["results"]] == best
    assert [item["relevance_score"] for item in answer["results"]] == pytest.approx(
        [expected[i] for i in best], abs=1e-6
    )
    tokens = sum(len(reranking.ids("fox?", text)) for text in DOCUMENTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert answer["model"] == "tiny-reranker"
    assert answer["id"]
    shown = [item.get("document") for item in answer["results"]]
    assert shown == ([None] * 4 if path == "/v2/rerank" else [{"text": DOCUMENTS[i]} for i in best])
    asked = post(reranking, path, **body, return_documents=path == "/v2/rerank", top_n=2).json()["results"]
    assert [item["index"] for item in asked] == best[:2]
    assert ("document" in asked[0]) == (path == "/v2/rerank")


def test_cohere_cuts_documents(reranking: PoolingServer) -> None:
    query = "the fox"
    long = "fox " * 100
    post(reranking, "/rerank", query=query, documents=[long, "fox"])
    context = reranking.double.contexts[-1]
    assert context.lengths.tolist() == [LIMIT, len(reranking.ids(query, "fox"))]
    assert context.tokens[: len(reranking.ids(query))].tolist() == reranking.ids(query)
    assert context.token_types is not None
    assert context.token_types[:LIMIT].tolist() == [0] * len(reranking.ids(query)) + [1] * (
        LIMIT - len(reranking.ids(query))
    )
    post(reranking, "/rerank", query=query, documents=[long], max_tokens_per_doc=5)
    assert reranking.double.contexts[-1].tokens.tolist() == reranking.ids(query, "fox " * 5)
    refused = post(reranking, "/rerank", query=query, documents=["fox", long], truncation=False)
    assert refused.status_code == 400
    assert refused.json()["message"].startswith("documents[1] has 105 tokens")


def test_sglangs_rerank_is_a_bare_list(reranking: PoolingServer) -> None:
    expected = scores(reranking, "fox?", DOCUMENTS)
    answer = post(reranking, "/v1/rerank", query="fox?", documents=DOCUMENTS).json()
    best = order(expected)
    assert [(item["index"], item["document"]) for item in answer] == [(i, DOCUMENTS[i]) for i in best]
    assert [item["score"] for item in answer] == pytest.approx([expected[i] for i in best], abs=1e-6)
    lengths = [len(reranking.ids("fox?", DOCUMENTS[i])) for i in best]
    assert [item["meta_info"]["prompt_tokens"] for item in answer] == lengths
    few = post(reranking, "/v1/rerank", query="fox?", documents=DOCUMENTS, top_n=1, return_documents=False).json()
    assert [set(item) for item in few] == [{"score", "index", "meta_info"}]
    refused = post(reranking, "/v1/rerank", model="x", query="a", documents=["b"], instruct="be fair").json()
    assert refused["error"]["message"] == "instruct: this reranker takes no instruction; leave it out"


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2")])
def test_vllms_score(reranking: PoolingServer, path: str, names: tuple[str, str]) -> None:
    first, second = names
    answer = post(reranking, path, **{first: "fox?", second: DOCUMENTS}).json()
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(i, "score") for i in range(4)]
    assert [item["score"] for item in answer["data"]] == pytest.approx(scores(reranking, "fox?", DOCUMENTS), abs=1e-6)
    paired = post(reranking, path, **{first: DOCUMENTS, second: DOCUMENTS[::-1]}, use_activation=False).json()
    expected = [scores(reranking, a, [b], raw=True)[0] for a, b in zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)]
    assert [item["score"] for item in paired["data"]] == pytest.approx(expected, rel=1e-5)
    assert post(reranking, path, **{first: DOCUMENTS[:2], second: DOCUMENTS}).status_code == 400


def test_a_model_that_makes_vectors_ranks_by_cosine(embedding: PoolingServer) -> None:
    """The query and the documents get the prompts that the checkpoint has for them."""
    query = unit(embedding.ids("query: fox?"))
    expected = [float(query @ unit(embedding.ids("passage: " + text))) for text in DOCUMENTS]
    answer = post(embedding, "/v1/rerank", model="", query="fox?", documents=DOCUMENTS).json()
    best = order(expected)
    assert [item["index"] for item in answer["results"]] == best
    assert [item["relevance_score"] for item in answer["results"]] == pytest.approx(
        [expected[i] for i in best], abs=1e-6
    )
    score = post(embedding, "/score", text_1="fox?", text_2=DOCUMENTS).json()["data"]
    assert [item["score"] for item in score] == pytest.approx(expected, abs=1e-6)
    assert embedding.double.contexts[-1].lengths.shape == (5,)


def test_a_model_that_makes_vectors_of_tokens_ranks_by_max_sim(serve: Serve, tmp_path: Path) -> None:
    """The sum over the query's tokens of the largest product with a token of the document that has a vector."""
    folder = checkpoint(tmp_path / "late", "BertModel")
    facts = {"model_type": "ColBERT", "prompts": PROMPTS}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(facts))

    def max_sim(query: str, document: str) -> float:
        firsts, seconds = ([unit([token]) for token in server.ids(text)] for text in (query, document))
        return sum(max(float(one @ other) for other in seconds) for one in firsts)

    with serve(folder, tasks=["embed_tokens"]) as server:
        expected = [max_sim("query: fox?", "passage: " + text) for text in DOCUMENTS]
        answer = post(server, "/v1/rerank", model="", query="fox?", documents=DOCUMENTS).json()
        best = order(expected)
        assert [item["index"] for item in answer["results"]] == best
        assert [item["relevance_score"] for item in answer["results"]] == pytest.approx(
            [expected[i] for i in best], abs=1e-6
        )
        paired = post(server, "/score", text_1=DOCUMENTS, text_2=DOCUMENTS[::-1]).json()["data"]
        pairs = zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)
        expected = [max_sim(f"query: {one}", f"passage: {other}") for one, other in pairs]
        assert [item["score"] for item in paired] == pytest.approx(expected, abs=1e-6)
        refused = post(server, "/rerank", query="fox?", texts=DOCUMENTS)
        assert refused.status_code in (400, 424)
        assert "scores documents for a query" in refused.text


def test_queries_and_documents_take_the_routes_of_a_router(serve: Serve, tmp_path: Path) -> None:
    """Each kind of text is a context of its own, and words that are looked up have no tokens around them."""
    folder = checkpoint(tmp_path / "routed", "BertModel")
    types = {"q_0_SparseStaticEmbedding": "st.SparseStaticEmbedding", "d_0_Dense": "st.Dense"}
    structure = {"query": ["q_0_SparseStaticEmbedding"], "document": ["d_0_Dense"]}
    (folder / "2_Router").mkdir()
    (folder / "2_Router" / "router_config.json").write_text(
        json.dumps({"types": types, "structure": structure, "parameters": {"default_route": "document"}})
    )
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Router": "2_Router"}
    (folder / "modules.json").write_text(json.dumps([{"type": kind, "path": path} for kind, path in paths.items()]))
    with serve(folder) as server:
        found = post(server, "/v1/rerank", model="", query="fox?", documents=DOCUMENTS[:2]).json()
        assert len(found["results"]) == 2
        first, second = server.double.contexts
        assert (first.route, second.route) == ("query", "document")
        assert first.tokens.tolist() == server.ids("fox?")[1:-1]
        assert second.tokens.tolist() == [token for text in DOCUMENTS[:2] for token in server.ids(text)]
        for name in (None, "query", "document"):
            post(server, "/v1/embeddings", input="fox", **({} if name is None else {"prompt_name": name}))
        assert [context.route for context in server.double.contexts[2:]] == ["", "query", "document"]


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_classify(classifying: PoolingServer, path: str) -> None:
    logits = [vector_of(np.array(classifying.ids(text), np.int32), 3) for text in DOCUMENTS]
    answer = post(classifying, path, input=DOCUMENTS).json()
    for i, item in enumerate(answer["data"]):
        assert item["probs"] == pytest.approx(activated(logits[i]).tolist(), rel=1e-5)
        assert (item["index"], item["label"], item["num_classes"]) == (i, LABELS[int(logits[i].argmax())], 3)
    raw = post(classifying, path, input=DOCUMENTS[0], use_activation=False).json()["data"][0]
    assert raw["probs"] == pytest.approx(logits[0].tolist(), rel=1e-5)
    listed = post(classifying, path, text=DOCUMENTS).json()
    assert [item["embedding"] for item in listed] == [item["probs"] for item in answer["data"]]
    single = post(classifying, path, input_ids=classifying.ids(DOCUMENTS[0])).json()
    assert single["embedding"] == listed[0]["embedding"]


def test_encode(embedding: PoolingServer) -> None:
    single = post(embedding, "/encode", text="the fox").json()
    assert single["embedding"] == pytest.approx(unit(embedding.ids("the fox")).tolist(), abs=1e-6)
    assert single["meta_info"]["prompt_tokens"] == len(embedding.ids("the fox"))
    listed = post(embedding, "/encode", text=["the fox", "fox"], dimensions=4).json()
    assert [len(item["embedding"]) for item in listed] == [4, 4]
    ids = post(embedding, "/encode", input_ids=[[5, 6], [7]]).json()
    assert ids[1]["embedding"] == pytest.approx(unit([7]).tolist(), abs=1e-6)
    refused = post(embedding, "/encode", text="a", input_ids=[5])
    assert refused.json()["error"]["message"] == "exactly one of text and input_ids must be given"


def test_pooling(embedding: PoolingServer, classifying: PoolingServer) -> None:
    answer = post(embedding, "/pooling", input=["the fox"]).json()["data"][0]
    assert answer["data"] == pytest.approx(unit(embedding.ids("the fox")).tolist(), abs=1e-6)
    tokens = post(embedding, "/pooling", input=["the fox"], task="token_embed").json()["data"][0]
    assert tokens["data"] == [pytest.approx(unit([token]).tolist(), abs=1e-6) for token in embedding.ids("the fox")]


def test_a_reward_model_scores_a_conversation(serve: Serve, tmp_path: Path) -> None:
    """A decoder with one label, as reward models are: the text is what the chat template makes of the messages."""
    model = checkpoint(tmp_path / "tiny-reward", "LlamaForSequenceClassification", model_type="llama", num_labels=1)
    opened = "{% if add_generation_prompt %}fox{% endif %}"
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}" + opened
    (model / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}]
    with serve(model, tasks=["classify"], labels=["LABEL_0"]) as server:
        said = "user the fox assistant jumps "
        raw = post(server, "/pooling", messages=messages, use_activation=False).json()["data"][0]["data"]
        ids = server.double.contexts[-1].tokens
        assert [token for token in ids.tolist() if token > 4] == [token for token in server.ids(said) if token > 4]
        assert raw == pytest.approx(vector_of(ids, 1).tolist(), rel=1e-5)
        (found,) = post(server, "/classify", messages=messages).json()["data"]
        assert found["probs"] == pytest.approx(activated(vector_of(ids, 1)).tolist(), rel=1e-5)
        longer = post(server, "/pooling", messages=messages, add_generation_prompt=True)
        assert longer.status_code == 200, longer.text
        assert len(server.double.contexts[-1].tokens) == len(ids) + 1
        (given,) = post(server, "/pooling", input=ids.tolist(), use_activation=False).json()["data"]
        assert given["data"] == raw
        both = post(server, "/pooling", input="a", messages=messages)
        assert both.json()["error"]["message"] == "exactly one of input and messages must be given"


def test_a_decoder_that_reranks_gets_its_form(serve: Serve, tmp_path: Path) -> None:
    """The form of Qwen3-Reranker, in which names of control tokens stay text."""
    model = checkpoint(tmp_path / "tiny-decoder", "Qwen3ForCausalLM", limit=512, model_type="qwen3")
    (model / "modules.json").write_text(
        '[{"path": "", "type": "x.Transformer"}, {"path": "1_LogitScore", "type": "x.LogitScore"}]'
    )
    (model / "1_LogitScore").mkdir()
    (model / "1_LogitScore" / "config.json").write_text('{"true_token_id": 5, "false_token_id": 6}')
    with serve(model, tasks=["classify"], labels=["yes"]) as server:
        assert httpx.get(server.url + "/v1/models").json()["data"][0]["task"] == "rerank"
        template = server.live.state.pooled_model.files.pair_template  # type: ignore[union-attr]
        assert template is not None
        encode = server.tokenizer.backend.encode
        framed = [
            *encode(template.prefix, add_special_tokens=False).ids,
            *encode(template.body("fox?", "the fox", "be fair"), add_special_tokens=False).ids,
            *encode(template.suffix, add_special_tokens=False).ids,
        ]
        post(server, "/v1/rerank", query="fox?", documents=["the fox"], instruct="be fair")
        assert server.double.contexts[-1].tokens.tolist() == framed
        post(server, "/rerank", query="fox?", documents=["[SEP] the [CLS] fox", "the fox " * 500])
        spelled, long = server.double.contexts[-1].texts()
        assert not {2, 3} & set(spelled.tolist())
        suffix = encode(template.suffix, add_special_tokens=False).ids
        assert len(long) == 512
        assert long[-len(suffix) :].tolist() == suffix


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/rerank", {"query": "a", "texts": ["b"], "documents": ["b"]}, "`documents` and `texts` were given"),
        ("/rerank", {"query": "a"}, "give `documents`, or `texts`"),
        ("/classify", {"input": "a", "text": "b"}, "`input` and `text` were given"),
        ("/classify", {}, "give `input`, `messages`, or `text`, `input_ids`"),
        ("/v1/score", {"text_1": "a", "items": "b"}, "`items` and `text_1` were given"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [5]}, "needs a model that generates text"),
        ("/v1/rerank", {"model": "gpt", "query": "a", "documents": ["b"]}, "the model 'gpt' does not exist"),
        ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents has 2049 texts"),
        ("/rerank", {"query": "fox " * 10**7, "documents": ["b"]}, "the text beside documents has"),
        ("/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 0}, "must be at least 1, or -1"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "", "documents": ["b"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1] must not be empty"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0] must be a text, or an object with a"),
        ("/rerank", {"query": "a", "documents": [5]}, "documents"),
        ("/v1/embeddings", {"input": "a"}, "start a server with --task embed"),
        ("/encode", {"text": "a"}, "start a server with --task embed"),
        ("/pooling", {"input": "a", "task": "embed"}, "start a server with --task embed"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "ask /v1/rerank"),
        ("/v1/completions", {"prompt": "x"}, "start a server with --task generate"),
        ("/v1/messages", {"messages": [], "max_tokens": 1}, "start a server with --task generate"),
        ("/generate", {"text": "x"}, "start a server with --task generate"),
        ("/generate", {"inputs": "x"}, "start a server with --task generate"),
    ],
)
def test_what_is_refused(reranking: PoolingServer, path: str, body: dict[str, Any], words: str) -> None:
    response = post(reranking, path, **body)
    assert response.status_code == (404 if "gpt" in words else 400), response.text
    error = response.json()["error"]
    assert words in (error if isinstance(error, str) else error["message"])
    assert reranking.double.submits == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/embed", {"inputs": "a"}),
        ("/rerank", {"query": "a", "texts": ["b"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}),
        ("/predict", {"inputs": "a"}),
        ("/encode", {"text": "a"}),
        ("/classify", {"input": "a"}),
        ("/pooling", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ],
)
def test_a_model_that_generates_names_the_remedy(live: LiveServer, path: str, body: dict[str, Any]) -> None:
    response = post(live, path, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "'tiny-chat' generates text (task generate)" in message
    assert "start a server with --task embed, rerank or classify" in message
    assert live.double.submits == []


def test_the_document_has_the_routes_that_the_model_can_answer(embedding: PoolingServer) -> None:
    paths = httpx.get(embedding.url + "/openapi.json").json()["paths"]
    expected = {"/v1/embeddings", "/embed", "/embed_all", "/rerank", "/v2/rerank", "/score", "/pooling", "/encode", "/"}
    assert expected <= set(paths)
    found = {path for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages") if path in paths}
    assert found == set()
    assert "sglang.ScoreRequest" not in str(paths["/v1/score"])


def test_examples_work(embedding: PoolingServer) -> None:
    document = httpx.get(embedding.url + "/openapi.json").json()
    answered = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            for example in content.get("examples", {}).values():
                response = httpx.request(method, embedding.url + path, json=example["value"], timeout=90)
                reasons = (
                    "needs a model that",
                    "no chat template",
                    "loads no adapters",
                    "nonexistent",
                    "cannot be found",
                )
                wrong = any(reason in response.text for reason in reasons)
                assert response.status_code == 200 or wrong, (path, response.text)
                answered |= set() if wrong else {path}
    assert {"/v1/embeddings", "/embed", "/embed_all", "/similarity", "/v1/rerank", "/score", "/encode", "/"} <= answered
