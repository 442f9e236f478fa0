"""Logits processors that requests name: SGLang's and vLLM's fields, schemas of parameters, and code that is refused."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import httpx
import pytest

from tests.api_server.conftest import LiveServer

CHAT = {"messages": [{"role": "user", "content": "a"}]}
PLAIN = {"prompt": "a"}
NATIVE = {"text": "a"}
OPENAI = (("/v1/completions", PLAIN), ("/v1/chat/completions", CHAT))

TOKEN = {"type": "object", "properties": {"token": {"type": "integer", "minimum": 0}}, "required": ["token"]}
STRICT = TOKEN | {"additionalProperties": False}


@pytest.fixture
def live_with_processors(live: LiveServer) -> LiveServer:
    live.state.settings = dataclasses.replace(live.state.settings, logit_processors="ban=my.package:Ban,any=m:P")
    live.double.tasks = ["generate"]
    live.double.processors = {"ban": json.dumps(STRICT), "any": '{"type": "object"}'}
    deadline = time.monotonic() + 20
    while not live.state.engine.model.processors:
        assert time.monotonic() < deadline, "the status with the processors has not come"
        time.sleep(0.02)
    return live


def post(live: LiveServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(live.url + path, json=body, timeout=20)


def named(live: LiveServer) -> dict[str, Any]:
    params = live.double.submits[-1].text.sampling_params
    return {name: json.loads(text) for name, text in params.named_processors.items()}


def test_sglangs_fields(live_with_processors: LiveServer) -> None:
    live = live_with_processors
    for path, body in OPENAI:
        sent = {"custom_logit_processor": "any", "custom_params": {"x": [1, None]}}
        assert post(live, path, body | sent).status_code == 200
        assert named(live) == {"any": {"x": [1, None]}}
    sampling = {"custom_params": {"token": 3}}
    assert post(live, "/generate", NATIVE | {"custom_logit_processor": "ban", "sampling_params": sampling}).is_success
    assert named(live) == {"ban": {"token": 3}}
    assert post(live, "/generate", {"text": ["a", "b"], "custom_logit_processor": ["any", None]}).is_success
    assert [list(s.text.sampling_params.named_processors) for s in live.double.submits[-2:]] == [["any"], []]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"logits_processors": ["any"]}, {"any": {}}),
        ({"logits_processors": ["any", {"qualname": "ban", "kwargs": {"token": 5}}]}, {"any": {}, "ban": {"token": 5}}),
        ({"vllm_xargs": {"token": 7}}, {"ban": {"token": 7}}),
        (
            {"vllm_xargs": {"token": 7, "x": "y"}, "logits_processors": ["any"]},
            {"any": {"x": "y"}, "ban": {"token": 7}},
        ),
        ({"custom_logit_processor": "ban", "vllm_xargs": {"token": 7}}, {"ban": {"token": 7}}),
        ({"logits_processors": [], "vllm_xargs": {}}, {}),
    ],
)
def test_vllms_fields(live_with_processors: LiveServer, sent: dict[str, Any], expected: dict[str, Any]) -> None:
    for path, body in OPENAI:
        response = post(live_with_processors, path, body | sent)
        assert response.status_code == 200, response.text
        assert named(live_with_processors) == expected


CODE = json.dumps({"callable": "80049503"})


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({"custom_logit_processor": "os:system"}, "one of ban, any; there is no 'os:system'"),
        ({"custom_logit_processor": CODE}, "code sent by clients is never run; start the server with --logit"),
        ({"logits_processors": ["any", "any"]}, "logits_processors[1] names 'any' again"),
        ({"logits_processors": [{"qualname": "ban", "args": [1]}]}, "logits_processors[0].args"),
        ({"logits_processors": [{"qualname": "os.system"}]}, "there is no 'os.system'"),
        ({"logits_processors": ["ban"]}, "logits_processors[0].kwargs.token is missing"),
        ({"custom_logit_processor": "ban", "custom_params": {"token": -1}}, "custom_params.token must be at least 0"),
        ({"vllm_xargs": {"tokn": 1}}, "vllm_xargs.'tokn' is no parameter of a logits processor; there are: token"),
        (
            {"custom_logit_processor": "ban", "custom_params": {"token": 1, "x": 2}},
            "custom_params.x is not known: custom_params may have token",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(live_with_processors: LiveServer, sent: dict[str, Any], words: str) -> None:
    live = live_with_processors
    for path, body in OPENAI:
        response = post(live, path, body | sent)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
    if set(sent) == {"custom_logit_processor"}:
        response = post(live, "/generate", NATIVE | sent)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
    assert not live.double.submits


def test_a_server_without_processors_names_the_setting(live: LiveServer) -> None:
    refused: list[dict[str, Any]] = [
        {"custom_logit_processor": CODE}, {"logits_processors": ["x"]}, {"vllm_xargs": {"x": 1}},
    ]  # fmt: skip
    for path, body in OPENAI:
        for sent in refused:
            response = post(live, path, body | sent)
            assert response.status_code == 400
            assert "start the server with --logit-processors MODULE:CLASS" in response.json()["error"]["message"]
    assert not live.double.submits
