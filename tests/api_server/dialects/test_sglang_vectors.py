"""Vectors in and out in SGLang's dialect: input_embeds, return_hidden_states; and the operator's logits processors."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import httpx
import numpy as np
import pytest

from api_server.dialects.sglang.schema import GenerateResponse
from tests.api_server.conftest import LiveServer, encode


def post(live: LiveServer, body: Any, path: str = "/generate") -> httpx.Response:
    return httpx.post(live.url + path, json=body, timeout=90)


def vectors(count: int) -> list[list[float]]:
    return [[random.uniform(-1, 1) for _ in range(4)] for _ in range(count)]


def configure(live: LiveServer, **values: Any) -> None:
    live.state.settings = dataclasses.replace(live.state.settings, **values)


def test_vectors_reach_the_scheduler(live: LiveServer) -> None:
    given = vectors(5)
    answer = post(live, {"input_embeds": given}).json()
    assert (answer["text"], answer["meta_info"]["prompt_tokens"]) == ("Hello, world!", 5)
    context = live.double.submits[0].text
    assert context.prompt_embeddings is not None
    np.testing.assert_array_equal(context.prompt_embeddings, np.array(given, np.float32))
    batch = [vectors(2), given]
    assert [a["meta_info"]["prompt_tokens"] for a in post(live, {"input_embeds": batch}).json()] == [2, 5]
    contexts = [submit.text for submit in live.double.submits]
    assert contexts[2].cache_salt == contexts[0].cache_salt != contexts[1].cache_salt


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_embeds": []}, "input_embeds cannot be empty."),
        ({"input_embeds": [[]]}, "input_embeds cannot be empty."),
        ({"input_embeds": [[[]]]}, "input_embeds must have vectors of one length."),
        ({"input_embeds": [[1, 2, 3, 4], [1]]}, "input_embeds must have vectors of one length."),
        ({"input_embeds": [[1, 2, 3, 4e38]]}, "input_embeds must have numbers that float32 can hold."),
        ({"input_embeds": [[1, 2, 3]]}, "input_embeds must have vectors of 4 numbers, got 3"),
        ({"input_embeds": [["a"]]}, "input_embeds"),
        ({"input_embeds": [[1, 2, 3, 4]], "text": "a"}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_embeds": [[1, 2, 3, 4]], "session_params": {"id": "s"}}, "session_params needs"),
        (
            {"input_embeds": [[1, 2, 3, 4]], "return_logprob": True, "logprob_start_len": 0},
            "a prompt of embeddings has no tokens",
        ),
        ({"input_embeds": [[0.5] * 4] * 300}, "The input (300 tokens) is longer"),
        ({"text": "a", "return_hidden_states": True}, "The server is not configured to return hidden states"),
        ({"text": "a", "custom_logit_processor": "m:P"}, "The server is not configured to enable custom logit"),
    ],
)
def test_what_is_refused(live: LiveServer, body: dict[str, Any], words: str) -> None:
    response = post(live, body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(words), response.text
    assert not live.double.submits


@pytest.mark.parametrize("stream", [False, True])
def test_hidden_states_of_all_tokens_but_the_last(live: LiveServer, stream: bool) -> None:
    configure(live, hidden_states=True)
    prompt = len(encode(live.state.tokenizer, "Hello"))
    body = {"text": ["Hello", "Hello"], "return_hidden_states": [True, False], "stream": stream}
    response = post(live, body)
    if stream:
        frames = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        answers = [next(f for f in reversed(frames) if f["index"] == i) for i in range(2)]
        unfinished = [f for f in frames if f["meta_info"]["finish_reason"] is None]
        assert not any("hidden_states" in frame["meta_info"] for frame in unfinished)
    else:
        answers = response.json()
    told, untold = (answer["meta_info"] for answer in answers)
    GenerateResponse.model_validate(answers[0])
    assert "hidden_states" not in untold
    first, *rest = told["hidden_states"]
    assert first == [[float(i)] * 4 for i in range(prompt)]
    assert rest == [[float(i)] * 4 for i in range(prompt, prompt + told["completion_tokens"] - 1)]
