"""TEI's routes on the scheduler double, also with huggingface_hub's client."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import InferenceClient

from interfaces import ErrorCode, RequestError
from tests.api_server.pooling.conftest import LABELS, LIMIT, PROMPTS, WIDTH, PoolingServer, activated, vector_of


def post(server: PoolingServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=90)


def vector(tokens: list[int], width: int = WIDTH) -> Any:
    return vector_of(np.array(tokens, np.int32), width)


def unit(tokens: list[int]) -> list[float]:
    found: list[float] = (vector(tokens) / np.linalg.norm(vector(tokens))).tolist()
    return found


def error_of(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error", "error_type"}
    assert response.json()["error_type"] == kind
    return str(response.json()["error"])


def test_embed(embedding: PoolingServer) -> None:
    ids = embedding.ids("the fox")
    wanted = pytest.approx(unit(ids), abs=1e-6)
    assert post(embedding, "/embed", inputs="the fox").json() == [wanted]
    assert post(embedding, "/embed", inputs=ids).json() == [wanted]
    assert post(embedding, "/embed", inputs=["fox", ids]).json()[1] == wanted
    raw = post(embedding, "/embed", inputs=["the fox"], normalize=False).json()
    assert raw == [pytest.approx(vector(ids).tolist(), rel=1e-6)]
    assert len(post(embedding, "/embed", inputs="the fox", dimensions=2).json()[0]) == 2
    post(embedding, "/embed", inputs="fox", prompt_name="query")
    assert embedding.double.contexts[-1].tokens.tolist() == embedding.ids(PROMPTS["query"] + "fox")


def test_embed_all(embedding: PoolingServer) -> None:
    answer = post(embedding, "/embed_all", inputs=["the fox", "fox"]).json()
    for text, rows in zip(("the fox", "fox"), answer, strict=True):
        assert rows == [pytest.approx(vector([token]).tolist(), rel=1e-5) for token in embedding.ids(text)]


def test_values_of_too_many_tokens_are_refused(embedding: PoolingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api_server.pooling.pooling.MOST_NUMBERS", 5 * WIDTH)
    tokens = len(embedding.ids("the fox"))
    message = error_of(post(embedding, "/embed_all", inputs=["the fox", "the fox"]), 422, "Validation")
    assert f"the values of {2 * tokens} tokens are {2 * tokens * WIDTH} numbers; at most {5 * WIDTH}" in message
    assert post(embedding, "/embed_all", inputs=["the fox"]).status_code == 200
    assert post(embedding, "/embed", inputs=["the fox", "the fox"]).status_code == 200


def test_truncation(embedding: PoolingServer) -> None:
    long = "fox " * 100
    message = error_of(post(embedding, "/embed", inputs=["fox", long]), 422, "Validation")
    assert message.startswith(f"Input validation error: inputs[1] has 102 tokens; this model takes at most {LIMIT}")
    assert "truncate: true" in message
    ids = embedding.ids("the " + "fox " * 100 + "jumps")
    for direction, kept in (("Right", [*ids[:63], ids[-1]]), ("Left", [ids[0], *ids[-63:]])):
        text = "the " + long + "jumps"
        answer = post(embedding, "/embed", inputs=text, truncate=True, truncation_direction=direction)
        assert answer.json() == [pytest.approx(unit(kept), abs=1e-6)]


def test_huggingface_hubs_client(embedding: PoolingServer) -> None:
    client = InferenceClient(base_url=embedding.url)
    found = client.feature_extraction("the fox", normalize=True)
    assert found[0] == pytest.approx(unit(embedding.ids("the fox")), abs=1e-6)
    others = ["a fox", "Hello, world!"]
    cosines = client.sentence_similarity("the fox", other_sentences=others)
    expected = [float(np.dot(unit(embedding.ids("the fox")), unit(embedding.ids(each)))) for each in others]
    assert cosines == pytest.approx(expected, abs=1e-5)
    assert post(embedding, "/similarity", inputs={"source_sentence": "the fox", "sentences": others}).json() == (
        pytest.approx(expected, abs=1e-5)
    )


def test_predict(classifying: PoolingServer) -> None:
    def expected(*texts: str, raw: bool = False) -> list[Any]:
        logits = vector(classifying.ids(*texts), 3)
        values = logits if raw else activated(logits)
        return [{"label": LABELS[i], "score": pytest.approx(float(values[i]), rel=1e-5)} for i in np.argsort(-values)]

    assert post(classifying, "/predict", inputs="the fox").json() == expected("the fox")
    assert post(classifying, "/predict", inputs="the fox", raw_scores=True).json() == expected("the fox", raw=True)
    assert post(classifying, "/predict", inputs=["the", "fox"]).json() == expected("the", "fox")
    batch = post(classifying, "/predict", inputs=[["the fox"], ["the", "fox"], ["fox"]]).json()
    assert batch == [expected("the fox"), expected("the", "fox"), expected("fox")]
    types = classifying.double.contexts[-1].token_types
    assert types is not None
    assert types.sum() == len(classifying.ids("fox")) - 1
    message = error_of(post(classifying, "/predict", inputs=[["a", "b", "c"]]), 422, "Validation")
    assert "got 3 texts" in message
    mixed = [["the"], ["the", "fox"], ["fox " * 100]]
    assert "inputs[2] has 102 tokens" in error_of(post(classifying, "/predict", inputs=mixed), 422, "Validation")
    assert ": inputs has 102 tokens" in error_of(post(classifying, "/predict", inputs="fox " * 100), 422, "Validation")


def test_rerank(reranking: PoolingServer) -> None:
    texts = ["the fox jumps", "Hello, world!", "fox", "the quick brown fox"]
    logits = [float(vector(reranking.ids("fox?", text), 1)[0]) for text in texts]
    order = sorted(range(4), key=lambda i: -logits[i])
    raw = post(reranking, "/rerank", query="fox?", texts=texts, raw_scores=True, return_text=True).json()
    assert raw == [{"index": i, "score": pytest.approx(logits[i], rel=1e-5), "text": texts[i]} for i in order]
    answer = post(reranking, "/rerank", query="fox?", texts=texts).json()
    assert [item["index"] for item in answer] == order
    assert [item["score"] for item in answer] == pytest.approx([1 / (1 + np.exp(-logits[i])) for i in order], rel=1e-5)
    assert post(reranking, "/v1/rerank", query="fox?", texts=texts).json() == answer


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "words"),
    [
        ("/embed", {"inputs": []}, 400, "Empty", "`inputs` cannot be empty"),
        ("/embed", {"inputs": ""}, 400, "Empty", "`inputs` cannot be empty"),
        ("/embed", {"inputs": ["fox", ""]}, 400, "Empty", "`inputs[1]` cannot be empty"),
        ("/embed", {"inputs": ["a"] * 2049}, 422, "Validation", "batch size 2049 > maximum allowed batch size 2048"),
        ("/embed", {"inputs": 5}, 422, "Validation", "inputs"),
        ("/embed", {}, 422, "Validation", "inputs"),
        ("/embed", {"inputs": "a", "prompt_name": "x"}, 422, "Validation", "prompt_name 'x' is unknown"),
        ("/embed", {"inputs": "a", "dimensions": 99}, 422, "Validation", "dimensions must be at most 8"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "Empty", "sentences"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["a", ""]}}, 400, "Empty", "sentences[1]"),
        ("/similarity", {"inputs": {"source_sentence": "", "sentences": ["a"]}}, 422, "Validation", "source_sentence"),
        ("/embed", {"inputs": "a" + " " * 60_000_000, "truncate": True}, 422, "Validation", "characters; at most"),
        ("/predict", {"inputs": "a"}, 400, "Validation", "needs a model that classifies texts"),
        ("/embed_sparse", {"inputs": "a"}, 400, "Validation", "start a server with --task sparse"),
        ("/rerank", {"query": "a", "texts": ["b"]}, 400, "Validation", "--task rerank"),
    ],
)
def test_errors(embedding: PoolingServer, path: str, body: dict[str, Any], status: int, kind: str, words: str) -> None:
    assert words in error_of(post(embedding, path, **body), status, kind)


def test_errors_of_the_engine(embedding: PoolingServer) -> None:
    embedding.double.refuse = RequestError(ErrorCode.OVERLOADED, "the queue is full")
    error_of(post(embedding, "/embed", inputs="fox"), 429, "Overloaded")
    embedding.double.refuse = RequestError(ErrorCode.FAILED, "the worker died")
    error_of(post(embedding, "/embed", inputs="fox"), 424, "Backend")
    embedding.double.refuse = RequestError(ErrorCode.UNAVAILABLE, "restarting")
    error_of(post(embedding, "/embed", inputs="fox"), 503, "Unhealthy")


def test_info(
    embedding: PoolingServer,
) -> None:
    facts = httpx.get(embedding.url + "/info").json()
    assert (facts["max_input_length"], facts["max_client_batch_size"]) == (LIMIT, 2048)
    assert set(facts["model_type"]) == {"embedding"}
    assert facts["max_batch_tokens"] == 4096
    assert facts["max_concurrent_requests"] == embedding.live.state.settings.max_queued


def test_info_of_a_classifier(classifying: PoolingServer) -> None:
    facts = httpx.get(classifying.url + "/info").json()
    assert facts["model_type"] == {
        "classifier": {
            "id2label": {str(i): name for i, name in enumerate(LABELS)},
            "label2id": {name: i for i, name in enumerate(LABELS)},
        }
    }


def test_tokenize_stays(embedding: PoolingServer) -> None:
    tokens = post(embedding, "/tokenize", inputs="the fox").json()
    assert [token["id"] for token in tokens] == embedding.ids("the fox")
