"""What hosting platforms call: /ping, /invocations by the body's keys, /vertex, and TGI's /chat_tokenize."""

from __future__ import annotations

import secrets
from typing import Any

import httpx
import pytest

from api_server.dialects.tgi.chat_tokenize import ChatTokenizeResponse
from interfaces.messages import Submit
from interfaces.result.results import ErrorCode, RequestError
from tests.api_server.conftest import LiveServer

HTTP = httpx.Client(timeout=90)


def post(live: LiveServer, path: str, body: Any) -> httpx.Response:
    return HTTP.post(live.url + path, json=body)


def echo(live: LiveServer) -> None:
    """Answers each prompt with itself."""
    end = live.state.tokenizer.eos_token_ids[0]

    def answer(submit: Submit) -> list[int]:
        return [*submit.text.tokens.prompt.tolist(), end]

    live.double.answer = answer


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def test_ping_is_health(live: LiveServer) -> None:
    assert HTTP.get(live.url + "/ping").status_code == HTTP.get(live.url + "/health").status_code == 200


def test_chat_tokenize_shows_the_prompt_of_chat_completions(live: LiveServer) -> None:
    text = f"Größe {secrets.token_hex(4)} 日本"
    body = chat(text) | {"temperature": 0.5, "max_tokens": 3}
    answer = ChatTokenizeResponse.model_validate(post(live, "/chat_tokenize", body).json())
    assert answer.templated_text == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    post(live, "/v1/chat/completions", body)
    prompt = live.double.submits[-1].text.tokens.prompt.tolist()
    assert [token.id for token in answer.tokenize_response] == prompt
    for token in answer.tokenize_response:
        assert token.text == answer.templated_text[token.start : token.stop]


@pytest.mark.parametrize("body", [{}, {"messages": []}, {"messages": [{"role": "user"}], "tools": 3}, {"messages": 1}])
def test_chat_tokenize_refuses_in_tgis_form(live: LiveServer, body: dict[str, Any]) -> None:
    response = post(live, "/chat_tokenize", body)
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"
    assert len(response.json()["error"]) > 20


def test_invocations_answer_in_the_dialect_of_the_keys(live: LiveServer) -> None:
    echo(live)
    word = secrets.token_hex(6)
    assert post(live, "/invocations", {"inputs": word, "parameters": {"return_full_text": False}}).json() == [
        {"generated_text": word}
    ]
    assert post(live, "/invocations", {"text": word}).json()["text"] == word
    assert [answer["text"] for answer in post(live, "/invocations", {"text": [word, "b"]}).json()] == [word, "b"]
    answer = post(live, "/invocations", {"prompt": word, "max_tokens": 50}).json()
    assert (answer["object"], answer["choices"][0]["text"]) == ("text_completion", word)
    answer = post(live, "/invocations", chat(word)).json()
    assert answer["object"] == "chat.completion"
    assert word in answer["choices"][0]["message"]["content"]


def test_invocations_stream_in_each_dialect(live: LiveServer) -> None:
    for body, last in [
        ({"inputs": "a"}, "details"),
        ({"text": "a"}, "[DONE]"),
        ({"prompt": "a"}, "[DONE]"),
        (chat("a"), "[DONE]"),
    ]:
        response = post(live, "/invocations", body | {"stream": True})
        assert response.headers["content-type"].startswith("text/event-stream"), body
        assert last in response.text.strip().rpartition("\n\n")[2]


@pytest.mark.parametrize(
    ("body", "status", "shape"),
    [
        ({}, 422, "tgi"),
        ({"inputs": "a", "messages": []}, 422, "tgi"),
        ({"inputs": "a", "text": "b"}, 422, "tgi"),
        ({"inputs": None}, 422, "tgi"),
        ({"inputs": "a", "parameters": {"top_k": 0}}, 422, "tgi"),
        ({"text": 3}, 400, "object"),
        ({"prompt": "a", "messages": []}, 400, "object"),
        ({"messages": 3}, 400, "object"),
    ],
)
def test_invocations_refuse_in_the_dialect_of_the_keys(
    live: LiveServer, body: dict[str, Any], status: int, shape: str
) -> None:
    response = post(live, "/invocations", body)
    assert response.status_code == status, response.text
    assert ("error_type" in response.json()) is (shape == "tgi")
    assert isinstance(response.json()["error"], str if shape == "tgi" else dict)
    assert HTTP.post(live.url + "/invocations", content=b"[").status_code == 400


def test_vertex_predicts_each_instance_in_order(live: LiveServer) -> None:
    echo(live)
    words = [secrets.token_hex(6) for _ in range(3)]
    instances = [{"inputs": words[0]}, chat(words[1]), {"inputs": words[2], "parameters": {"return_full_text": True}}]
    predictions = post(live, "/vertex", {"instances": instances}).json()["predictions"]
    assert predictions[0] == words[0]
    assert words[1] in predictions[1]
    assert predictions[2] == words[2] * 2
    assert len({submit.handle for submit in live.double.submits}) == 3


@pytest.mark.parametrize(
    ("instances", "named"),
    [
        ([], "instances"),
        ([3], "instances"),
        ([{"inputs": "a"}, {}], "instances[1]"),
        ([{"inputs": "a", "messages": []}], "instances[0]"),
        ([{"text": "a"}], "instances[0]"),
        ([{"inputs": "a", "parameters": {"temperature": 0}}], "temperature"),
        ([chat("a") | {"n": 2}], "n must be 1"),
    ],
)
def test_vertex_names_the_instance_that_is_wrong(live: LiveServer, instances: Any, named: str) -> None:
    response = post(live, "/vertex", {"instances": instances})
    assert response.status_code == 422, response.text
    assert named in response.json()["error"]
    assert not live.double.submits


def test_vertex_tells_of_overload(live: LiveServer) -> None:
    live.double.refuse = RequestError(ErrorCode.OVERLOADED, "the queue is full")
    response = post(live, "/vertex", {"instances": [{"inputs": "a"}]})
    assert (response.status_code, response.json()["error_type"]) == (429, "overloaded")
    assert 'tokenyard_requests_total{outcome="overloaded",route="/vertex"} 1.0' in HTTP.get(live.url + "/metrics").text
