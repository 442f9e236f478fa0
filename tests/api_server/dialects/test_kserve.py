"""The Open Inference Protocol v2 on the scheduler double."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from api_server.dialects.kserve.schema import GenerateAnswer, InferAnswer
from api_server.text.tokenizer import Tokenizer
from interfaces.result.results import ErrorCode, RequestError
from shared.access_keys import AccessKeys, digest_of
from tests.api_server.conftest import LiveServer, encode
from tests.api_server.dialects.test_openai import UNICODE, post, says

MODEL = "/v2/models/tiny-chat"


def tensor(*data: Any, name: str = "text_input", datatype: str = "BYTES", **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [len(data)], "data": list(data), **more}


def error_of(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    return str(response.json()["error"])


@pytest.mark.parametrize("version", ["", "/versions/1"])
def test_generate(live: LiveServer, tokenizer: Tokenizer, version: str) -> None:
    body = {"id": "7", "text_input": "The fox", "parameters": {"max_tokens": 9, "temperature": 0, "stop": "!"}}
    answer = post(live, f"{MODEL}{version}/generate", body).json()
    assert answer == {
        "id": "7",
        "model_name": "tiny-chat",
        "model_version": "1",
        "text_output": "Hello, world",
        "finish_reason": "stop",
    }
    submit = live.double.submits[-1].text
    assert submit.tokens.prompt.tolist() == encode(tokenizer, "The fox")
    assert (submit.sampling_params.max_new_tokens, submit.sampling_params.temperature) == (9, 0)
    assert post(live, f"{MODEL}/generate", {"text_input": "x"}).status_code == 200
    assert live.double.submits[-1].text.sampling_params.max_new_tokens == 16


def test_streamed_text_is_the_text(live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live.double, tokenizer, UNICODE)
    response = post(live, f"{MODEL}/generate_stream", {"text_input": "x", "parameters": {"max_tokens": 200}})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(frame.removeprefix("data: ")) for frame in response.text.split("\n\n")[:-1]]
    assert "".join(event["text_output"] for event in events) == UNICODE
    assert [event.get("finish_reason") for event in events] == [None] * (len(events) - 1) + ["stop"]
    for event in events:
        assert GenerateAnswer.model_validate(event).model_dump(exclude_unset=True) == event


def test_infer_answers_each_prompt(live: LiveServer) -> None:
    body = {
        "id": "a",
        "inputs": [tensor("one", "two"), tensor(5, name="max_tokens", datatype="INT32")],
        "outputs": [{"name": "text_output"}, {"name": "num_output_tokens"}, {"name": "finish_reason"}],
        "parameters": {"seed": 3},
    }
    answer = post(live, f"{MODEL}/infer", body).json()
    texts, counts, reasons = answer["outputs"]
    assert (texts["name"], texts["datatype"], texts["shape"], len(texts["data"])) == ("text_output", "BYTES", [2], 2)
    assert counts["data"] == [5, 5]
    assert reasons["data"] == ["length", "length"]
    assert answer["id"] == "a"
    assert InferAnswer.model_validate(answer).model_dump(exclude_unset=True) == answer
    assert {submit.text.sampling_params.seed for submit in live.double.submits} == {3}
    nested = {"name": "text_input", "datatype": "BYTES", "shape": [2, 1], "data": [["one"], ["two"]]}
    whole = post(live, f"{MODEL}/infer", {"inputs": [nested]}).json()
    assert whole["outputs"] == [
        {"name": "text_output", "datatype": "BYTES", "shape": [2], "data": ["Hello, world!", "Hello, world!"]}
    ]
    as_json = tensor('{"max_tokens": 3, "stop": ["x"]}', name="sampling_parameters")
    post(live, f"{MODEL}/infer", {"inputs": [tensor("one"), as_json]})
    found = live.double.submits[-1].text.sampling_params
    assert (found.max_new_tokens, found.stop) == (3, ["x"])


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, "inputs: missing field"),
        ({"inputs": []}, "inputs"),
        ({"inputs": [tensor(5, name="max_tokens")]}, "inputs must have a tensor text_input"),
        ({"inputs": [tensor("x", datatype="FP32")]}, "text_input must be of datatype BYTES, got 'FP32'"),
        ({"inputs": [tensor(5)]}, "text_input.data must be a list of texts"),
        ({"inputs": [tensor("x"), tensor("y")]}, "each tensor needs a name of its own"),
        ({"inputs": [tensor("x") | {"shape": [2]}]}, "the shape [2] has 2 elements, and data has 1"),
        ({"inputs": [tensor("x"), tensor(1, name="mood")]}, "there is no tensor 'mood'"),
        ({"inputs": [tensor("x"), tensor(1, 2, name="seed")]}, "seed must have one element, got 2"),
        ({"inputs": [tensor("x"), tensor("no", name="sampling_parameters")]}, "sampling_parameters must have"),
        ({"inputs": [tensor("x", parameters={"binary_data_size": 3})]}, "binary data"),
        ({"inputs": [tensor("x")], "outputs": [{"name": "logits"}]}, "there is no output 'logits'"),
        ({"inputs": [tensor("x")], "parameters": {"top_p": 3}}, "top_p"),
    ],
)
def test_a_wrong_body_is_named(live: LiveServer, body: Any, error: str) -> None:
    assert error in error_of(post(live, f"{MODEL}/infer", body))


def test_models_and_versions(live: LiveServer) -> None:
    facts = httpx.get(live.url + MODEL).json()
    assert facts["versions"] == ["1"]
    assert facts["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": [-1]}]
    assert "text_output" in [output["name"] for output in facts["outputs"]]
    assert httpx.get(f"{live.url}{MODEL}/versions/1").json() == facts
    assert httpx.get(f"{live.url}{MODEL}/ready").json() == {"name": "tiny-chat", "ready": True}
    assert httpx.get(f"{live.url}{MODEL}/versions/1/ready").status_code == 200
    assert "'other' does not exist" in error_of(httpx.get(live.url + "/v2/models/other"), 404)
    assert "the version '2'" in error_of(post(live, f"{MODEL}/versions/2/generate", {"text_input": "x"}), 404)
    assert httpx.get(live.url + "/v2").json()["extensions"] == ["generate"]


def test_health_needs_no_key_and_is_honest(live: LiveServer) -> None:
    live.state.keys = AccessKeys((digest_of("secret"),))
    assert httpx.get(live.url + "/v2/health/live").json() == {"live": True}
    assert httpx.get(live.url + "/v2/health/ready").json() == {"ready": True}
    assert httpx.get(live.url + MODEL).status_code == 401
    live.double.ready = False
    live.double.wait(lambda: httpx.get(live.url + "/v2/health/ready").status_code == 503)
    assert httpx.get(live.url + "/v2/health/ready").json() == {"ready": False}


def test_failures_are_counted_under_the_path_of_the_route(live: LiveServer) -> None:
    live.double.refuse = RequestError(ErrorCode.OVERLOADED, "the queue is full")
    busy = post(live, f"{MODEL}/generate", {"text_input": "x"})
    assert error_of(busy, 429)
    assert int(busy.headers["retry-after"]) >= 1
    text = httpx.get(live.url + "/metrics").text
    line = next(line for line in text.splitlines() if "tokenyard_requests_total" in line and "/generate" in line)
    assert 'route="/v2/models/{model:path}/generate"' in line
