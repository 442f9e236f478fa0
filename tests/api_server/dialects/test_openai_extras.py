"""What SGLang's and vLLM's clients add to OpenAI's bodies, on the scheduler double."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.api_server.conftest import LiveServer, encode
from tests.api_server.scheduler_double import logprob_of

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
PLAIN = {"prompt": "Hello there"}


def post(live: LiveServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(live.url + path, json=body, timeout=90)


@pytest.mark.parametrize(("most", "logprobs"), [(0, None), (3, None), (2, 1), (1, 4)])
def test_prompt_logprobs_of_a_completion(live: LiveServer, most: int, logprobs: int | None) -> None:
    tokenizer = live.state.tokenizer
    answer = post(live, "/v1/completions", **PLAIN, prompt_logprobs=most, logprobs=logprobs, max_tokens=3, n=2).json()
    ids = encode(tokenizer, "Hello there")
    for choice in answer["choices"]:
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        for token, entries in zip(ids[1:], rest, strict=True):
            assert entries[str(token)]["logprob"] == logprob_of(token)
            assert entries[str(token)]["decoded_token"] == tokenizer.piece(token)
            ranks = sorted(entry["rank"] for entry in entries.values() if entry["rank"] is not None)
            assert ranks == list(range(1, most + 1))
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            assert all(logprobs <= len(top) <= logprobs + 1 for top in choice["logprobs"]["top_logprobs"])


def test_prompt_logprobs_of_a_chat_and_without_an_answer(live: LiveServer) -> None:
    answer = post(live, "/v1/chat/completions", **CHAT, prompt_logprobs=1).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    scored = post(live, "/v1/completions", **PLAIN, prompt_logprobs=1, max_tokens=0).json()
    assert scored["choices"][0]["text"] == ""
    assert len(scored["choices"][0]["prompt_logprobs"]) == scored["usage"]["prompt_tokens"]


def test_token_ids(live: LiveServer) -> None:
    tokenizer = live.state.tokenizer
    ids = [*encode(tokenizer, "Hello, world!"), tokenizer.eos_token_ids[0]]
    plain = post(live, "/v1/completions", prompt=["Hello", "there"], max_tokens=50, return_token_ids=True).json()
    assert [c["prompt_token_ids"] for c in plain["choices"]] == [encode(tokenizer, t) for t in ("Hello", "there")]
    assert [c["token_ids"] for c in plain["choices"]] == [ids, ids]
    chat = post(live, "/v1/chat/completions", **CHAT, return_token_ids=True).json()
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert chat["choices"][0]["token_ids"] == ids


def chunks(live: LiveServer, path: str, **body: Any) -> list[dict[str, Any]]:
    lines = post(live, path, **body, stream=True).text.splitlines()
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if line]


@pytest.mark.parametrize(
    "more",
    [{}, {"n": 2}, {"stop": "!"}, {"stop": "never there"}, {"logprobs": True}, {"max_tokens": 1}, {"echo": True}],
    ids=str,
)
def test_token_ids_of_a_stream_are_those_of_the_whole_answer(live: LiveServer, more: dict[str, Any]) -> None:
    body = {"max_tokens": 50, "return_token_ids": True} | more
    chat = {name: value for name, value in body.items() if name != "echo"}
    if "logprobs" in more:
        body["logprobs"] = 1  # a number there
    whole = post(live, "/v1/chat/completions", **CHAT, **chat).json()
    frames = chunks(live, "/v1/chat/completions", **CHAT, **chat)
    assert [frame.get("prompt_token_ids") for frame in frames] == [whole["prompt_token_ids"]] + [None] * (
        len(frames) - 1
    )
    assert streamed_ids(frames) == {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
    for prompt in ("Hello there", ["Hello", "there"]):
        whole = post(live, "/v1/completions", **body | {"prompt": prompt}).json()
        frames = chunks(live, "/v1/completions", **body | {"prompt": prompt})
        assert streamed_ids(frames) == {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
        first: dict[int, Any] = {}
        for choice in (choice for frame in frames for choice in frame["choices"]):
            told = choice.get("prompt_token_ids")
            assert (told is None) == (choice["index"] in first)
            first.setdefault(choice["index"], told)
        assert first == {choice["index"]: choice["prompt_token_ids"] for choice in whole["choices"]}


def streamed_ids(frames: list[dict[str, Any]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for choice in (choice for frame in frames for choice in frame["choices"]):
        found.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    return found


def test_tokens_of_logprobs_as_ids(live: LiveServer) -> None:
    ids = [f"token_id:{token}" for token in encode(live.state.tokenizer, "Hello, world!")]
    plain = post(live, "/v1/completions", **PLAIN, logprobs=1, max_tokens=50, return_tokens_as_token_ids=True).json()
    logprobs = plain["choices"][0]["logprobs"]
    assert logprobs["tokens"][: len(ids)] == ids
    assert all(name.startswith("token_id:") for top in logprobs["top_logprobs"] for name in top)
    asked = {**CHAT, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    chat = post(live, "/v1/chat/completions", **asked).json()
    assert [entry["token"] for entry in chat["choices"][0]["logprobs"]["content"]][: len(ids)] == ids


def test_restrictions_reach_the_scheduler(live: LiveServer) -> None:
    tokenizer = live.state.tokenizer
    for path, body in (("/v1/completions", PLAIN), ("/v1/chat/completions", CHAT)):
        assert post(live, path, **body, bad_words=["world", " world"], allowed_token_ids=[5, 7]).status_code == 200
        sampling = live.double.submits[-1].text.sampling_params
        assert sampling.allowed_token_ids == [5, 7]
        assert sampling.bad_words == [encode(tokenizer, form) for form in ("world", " world")]
        refused: list[dict[str, Any]] = [
            {"allowed_token_ids": [10**6]}, {"allowed_token_ids": []}, {"bad_words": [" "]}, {"bad_words": [5]},
        ]  # fmt: skip
        for wrong in refused:
            response = post(live, path, **body, **wrong)
            assert response.status_code == 400
            assert next(iter(wrong)) in response.json()["error"]["message"]


def test_sglangs_fields(live: LiveServer) -> None:
    for path, body in (("/v1/completions", PLAIN), ("/v1/chat/completions", CHAT)):
        answer = post(live, path, **body, stop_regex="w[a-z]", rid="mine", extra_key="k", max_tokens=50).json()
        choice = answer["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert (text.startswith("Hello, w"), choice["finish_reason"]) == (True, "stop")
        assert text != "Hello, world!"
        context = live.double.submits[-1].text
        assert (context.request_id, context.cache_salt) == ("mine", "k\0")
        kept = post(live, path, **body, stop=",", no_stop_trim=True, max_tokens=50).json()["choices"][0]
        assert (kept["text"] if "text" in kept else kept["message"]["content"]) == "Hello,"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"stop_regex": "("}, "stop_regex"),
        ({"stop_regex": ["a"] * 33}, "stop_regex"),
        ({"custom_logit_processor": "x"}, "custom_logit_processor"),
        ({"rid": ""}, "rid"),
    ],
)
def test_what_cannot_be_had(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    for path, body in (("/v1/completions", PLAIN), ("/v1/chat/completions", CHAT)):
        response = post(live, path, **body, **fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
    assert not live.double.submits


def test_other_endpoints_still_refuse_them(live: LiveServer) -> None:
    response = post(live, "/v1/responses", input="Hello", stop_regex="a")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stop_regex")
