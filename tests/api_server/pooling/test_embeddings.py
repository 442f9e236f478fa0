"""POST /v1/embeddings on the scheduler double, with OpenAI's own client; the values themselves are in tests/system."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from api_server.access_log import Entry
from api_server.answers.one_shot import OneShot
from interfaces import ErrorCode, PoolingTask, RequestError
from tests.api_server.conftest import leave_when
from tests.api_server.pooling.conftest import LIMIT, PROMPTS, WIDTH, PoolingServer, vector_of


def post(server: PoolingServer, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return httpx.post(server.url + "/v1/embeddings", json=body, headers=headers, timeout=90)


def unit(tokens: list[int], width: int = WIDTH) -> list[float]:
    vector = vector_of(np.array(tokens, np.int32))[:width]
    found: list[float] = (vector / np.linalg.norm(vector)).tolist()
    return found


def error_of(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


def test_openais_client_gets_the_vectors_in_order(embedding: PoolingServer) -> None:
    client = openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="x")
    texts = [f"the fox {'jumps ' * (i % 7)}" for i in range(101)]
    answer = client.embeddings.create(model="tiny-embedder", input=texts)
    for i, (text, item) in enumerate(zip(texts, answer.data, strict=True)):
        assert item.index == i
        assert item.embedding == pytest.approx(unit(embedding.ids(text)), abs=1e-6)
    tokens = sum(len(embedding.ids(text)) for text in texts)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.model) == (tokens, tokens, "tiny-embedder")
    assert [len(context) for context in embedding.double.contexts] == [101]


def test_every_form_of_input(embedding: PoolingServer) -> None:
    ids = embedding.ids("the fox")
    other = embedding.ids("Hello, world!")
    forms: list[tuple[Any, list[list[int]]]] = [
        ("the fox", [ids]),
        (["the fox"], [ids]),
        (ids, [ids]),
        ([ids, other], [ids, other]),
        ([[5.0, 6]], [[5, 6]]),
    ]
    for given, texts in forms:
        data = post(embedding, input=given).json()["data"]
        assert [item["embedding"] for item in data] == [pytest.approx(unit(text), abs=1e-6) for text in texts]
    assert {context.task for context in embedding.double.contexts} == {PoolingTask.EMBED}


def test_base64_has_the_same_bits(embedding: PoolingServer) -> None:
    plain, coded = (post(embedding, input="the fox", encoding_format=form).json() for form in ("float", "base64"))
    numbers = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
    assert np.float32(plain["data"][0]["embedding"]).tobytes() == numbers.tobytes()


def test_dimensions_and_length(embedding: PoolingServer) -> None:
    ids = embedding.ids("the fox")
    cut = post(embedding, input="the fox", dimensions=3).json()["data"][0]["embedding"]
    assert cut == pytest.approx(unit(ids, 3), abs=1e-6)
    for option in ({"normalize": False}, {"use_activation": False}):
        raw = post(embedding, None, input="the fox", **option).json()["data"][0]["embedding"]
        assert raw == pytest.approx(vector_of(np.array(ids, np.int32)).tolist(), rel=1e-6)
    message = error_of(post(embedding, input="the fox", dimensions=WIDTH + 1))
    assert message == f"dimensions must be at most {WIDTH}, the width of this model's vectors, got {WIDTH + 1}"


def test_long_texts(embedding: PoolingServer) -> None:
    """The limit is the checkpoint's own, below the 512 that the worker reports."""
    long = "fox " * 100
    message = error_of(post(embedding, input=["fox", long]))
    assert message.startswith(f"input[1] has 102 tokens; this model takes at most {LIMIT}: shorten it, or send trunc")
    assert error_of(post(embedding, input=[5] * 65)).startswith("input has 65 tokens")
    whole = embedding.ids(long)
    for most, kept in ((-1, LIMIT), (10, 10), (1000, LIMIT)):
        answer = post(embedding, input=long, truncate_prompt_tokens=most).json()
        assert answer["usage"]["prompt_tokens"] == kept
        assert answer["data"][0]["embedding"] == pytest.approx(unit([*whole[: kept - 1], whole[-1]]), abs=1e-6)
    post(embedding, input=[5, *[6] * 70, 7], truncate_prompt_tokens=3, truncation_side="left")
    assert embedding.double.contexts[-1].tokens.tolist() == [6, 6, 7]


def test_prompts_and_lower_case(embedding: PoolingServer) -> None:
    for name, prompt in PROMPTS.items():
        post(embedding, input=["the fox"], prompt_name=name)
        assert embedding.double.contexts[-1].tokens.tolist() == embedding.ids(prompt + "the fox")
    message = error_of(post(embedding, input=["the fox"], prompt_name="title"))
    assert message == "prompt_name 'title' is unknown: this model has query, document"
    post(embedding, input=["fox"], add_special_tokens=False)
    assert embedding.double.contexts[-1].tokens.tolist() == embedding.ids("fox")[1:-1]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": ""}, "input must not be empty"),
        ({"input": []}, "input must not be empty"),
        ({"input": ["a", ""]}, r"input[1] must not be empty"),
        ({"input": [[5], []]}, r"input[1] must not be empty"),
        ({"input": ["a"] * 2049}, "input has 2049 texts; at most 2048 are possible"),
        ({"input": [10**6]}, "contains token id 1000000"),
        ({"input": ["a", [5]]}, "input"),
        ({"input": 7}, "input"),
        ({}, "exactly one of input and messages must be given"),
        ({"input": "a", "messages": [{"role": "user", "content": "x"}]}, "exactly one of input and messages"),
        ({"messages": [{"role": "user", "content": "x"}]}, "chat template"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1, or -1"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype: a type of numbers other than float32"),
        ({"input": "a", "timeout": -1}, "timeout must be a number of seconds above 0"),
    ],
)
def test_what_is_refused(embedding: PoolingServer, body: dict[str, Any], words: str) -> None:
    assert words in error_of(post(embedding, **body))
    assert embedding.double.submits == []


def test_another_model_is_not_found(embedding: PoolingServer) -> None:
    assert "text-embedding-3-small" in error_of(post(embedding, input="a", model="text-embedding-3-small"), 404)


def test_errors_of_the_engine(embedding: PoolingServer) -> None:
    embedding.double.refuse = RequestError(ErrorCode.OVERLOADED, "the queue is full")
    response = post(embedding, input="fox")
    error_of(response, 429)
    assert int(response.headers["retry-after"]) >= 1
    embedding.double.refuse = RequestError(ErrorCode.FAILED, "the worker died three times")
    assert error_of(post(embedding, input="fox"), 500) == "the worker died three times"


def test_scheduling_options_reach_the_scheduler(embedding: PoolingServer) -> None:
    post(embedding, {"x-request-priority": "-3"}, input="fox", timeout=7)
    scheduling = embedding.double.submits[-1].scheduling
    assert scheduling.priority == -3
    assert scheduling.total_seconds == pytest.approx(7, abs=1)


def test_a_client_that_leaves_cancels_its_texts(embedding: PoolingServer) -> None:
    embedding.double.hold.set()
    leave_when(lambda: embedding.double.submits, embedding.live, "/v1/embeddings", {"input": ["fox"] * 9})
    embedding.double.wait(lambda: embedding.double.cancelled)
    assert embedding.double.cancelled == [embedding.double.submits[-1].handle]


def test_metrics_count_texts_and_tokens(embedding: PoolingServer) -> None:
    post(embedding, input=["the fox", "fox"])
    post(embedding, input="")
    tokens = len(embedding.ids("the fox")) + len(embedding.ids("fox"))
    lines = httpx.get(embedding.url + "/metrics").text.splitlines()
    assert "tokenyard_pooled_texts_total 2.0" in lines
    assert f"tokenyard_prompt_tokens_total {float(tokens)}" in lines
    assert 'tokenyard_requests_total{outcome="ok",route="/v1/embeddings"} 1.0' in lines
    assert 'tokenyard_requests_total{outcome="invalid",route="/v1/embeddings"} 1.0' in lines
    assert "tgi_request_count 2.0" in lines


def test_a_large_answer_is_the_same_as_a_small_one(embedding: PoolingServer) -> None:
    """2048 vectors are written in pieces."""
    texts = [[5 + i % 90, 7] for i in range(2048)]
    for form in ("float", "base64"):
        data = post(embedding, input=texts, encoding_format=form).json()["data"]
        assert [item["index"] for item in data] == list(range(2048))
        small = post(embedding, input=texts[:300], encoding_format=form).json()["data"]
        assert data[:300] == small


def test_what_the_server_says_of_itself(embedding: PoolingServer) -> None:
    model = httpx.get(embedding.url + "/v1/models").json()["data"][0]
    assert (model["id"], model["task"]) == ("tiny-embedder", "embed")
    assert httpx.get(embedding.url + "/model_info").json()["is_generation"] is False
    assert httpx.get(embedding.url + "/health_generate").status_code == 200


def test_the_access_log_has_texts_and_tokens() -> None:
    entry = Entry()
    entry.shots.append(OneShot("/v1/embeddings", 0.0, texts=3, tokens=17))
    entry.shots.append(OneShot("/v1/embeddings", 0.0, texts=1, tokens=4))
    facts = entry.facts()
    assert (facts["texts"], facts["prompt_tokens"]) == (4, 21)
