"""POST /v1/score on the scheduler double; the figures themselves are compared with transformers in tests/system."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from tests.api_server.conftest import LiveServer, encode
from tests.api_server.scheduler_double import logprob_of


def post(live: LiveServer, **body: Any) -> httpx.Response:
    return httpx.post(live.url + "/v1/score", json=body, timeout=90)


def test_each_item_gets_a_row(live: LiveServer) -> None:
    tokenizer, labels = live.state.tokenizer, [9, 5, 9]
    answer = post(live, query="Hello ", items=["fox", "dog"], label_token_ids=labels).json()
    prompts = [[*encode(tokenizer, "Hello "), *encode(tokenizer, item)] for item in ("fox", "dog")]
    assert answer["object"] == "scoring"
    assert answer["scores"] == [pytest.approx([math.exp(logprob_of(t)) for t in labels])] * 2
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(map(len, prompts))
    assert [s.text.tokens.prompt.tolist() for s in live.double.submits] == prompts
    assert [s.text.sampling_params.max_new_tokens for s in live.double.submits] == [1, 1]


def test_softmax_order_and_ids(live: LiveServer) -> None:
    body = {"query": [3, 4], "items": [[5], [6, 7]], "label_token_ids": [9, 5], "apply_softmax": True}
    scores = post(live, **body, item_first=True).json()["scores"]
    assert [sum(row) for row in scores] == pytest.approx([1, 1])
    assert math.log(scores[0][0] / scores[0][1]) == pytest.approx(logprob_of(9) - logprob_of(5))
    assert [s.text.tokens.prompt.tolist() for s in live.double.submits] == [[5, 3, 4], [6, 7, 3, 4]]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"query": "a", "items": "b", "label_token_ids": [10**6]}, "Token ID 1000000 is out of vocabulary"),
        ({"query": "a", "items": "b", "label_token_ids": [-1]}, "Token ID -1 is out of vocabulary"),
        ({"query": "a", "items": [], "label_token_ids": [1]}, "items must not be empty"),
        ({"query": "a", "items": [[1]], "label_token_ids": [1]}, "must both be texts"),
        ({"query": [1], "items": "b", "label_token_ids": [1]}, "must both be texts"),
        ({"query": "a", "items": "b", "label_token_ids": []}, "label_token_ids"),
        ({"query": "", "items": "", "label_token_ids": [1]}, "the prompt is empty"),
        ({"query": "a", "items": ["b"] * 2000, "label_token_ids": [1]}, "items has 2000 entries"),
        ({"items": "b"}, "query"),
    ],
)
def test_what_cannot_be_scored(live: LiveServer, body: dict[str, Any], words: str) -> None:
    response = post(live, **body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert not live.double.submits
