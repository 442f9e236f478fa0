"""The TGI dialect over HTTP: real clients, its parameters, errors and headers, on the scheduler double."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import OverloadedError, UnknownError, ValidationError

from api_server.dialects.tgi.schema import (
    ErrorResponse,
    GenerateRequest,
    GenerateResponse,
    Info,
    SimpleToken,
    StreamResponse,
)
from interfaces.messages import Finish, Results
from interfaces.request.sampling import LogprobMode, SamplingParams
from interfaces.result.results import ErrorCode, RequestError
from interfaces.wire.codec import encode as to_wire
from tests.api_server.conftest import LiveServer, encode
from tests.api_server.scheduler_double import logprob_of

MANY = "The quick brown fox jumps over the lazy dog. " * 40

HTTP = httpx.Client(timeout=90)


def post(live: LiveServer, path: str, body: Any) -> httpx.Response:
    return HTTP.post(live.url + path, json=body)


def generate(live: LiveServer, **parameters: Any) -> httpx.Response:
    return post(live, "/generate", {"inputs": "Hello", "parameters": parameters})


def frames(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def last_sampling(live: LiveServer) -> SamplingParams:
    return live.double.submits[-1].text.sampling_params


def answer_with(live: LiveServer, text: str) -> list[int]:
    ids = encode(live.state.tokenizer, text)
    live.double.answer = lambda _: [*ids, live.state.tokenizer.eos_token_ids[0]]
    return ids


def test_huggingface_client_gets_text_and_details(live: LiveServer) -> None:
    ids = answer_with(live, "Größe 日本")
    client = InferenceClient(live.url)
    assert client.text_generation("Hello", return_full_text=False) == "Größe 日本"
    assert client.text_generation("Hello", max_new_tokens=20) == "HelloGröße 日本"  # as the hosted pipelines do
    found = client.text_generation("Hello", details=True, seed=7, do_sample=True, return_full_text=False)
    assert found.generated_text == "Größe 日本"
    assert found.details is not None
    assert (found.details.finish_reason, found.details.generated_tokens) == ("eos_token", len(ids) + 1)
    assert (found.details.seed, found.details.prefill) == (7, [])
    tokens = found.details.tokens
    assert [token.id for token in tokens] == [*ids, live.state.tokenizer.eos_token_ids[0]]
    assert "".join(token.text for token in tokens[:-1]) == "Größe 日本"
    assert [token.special for token in tokens] == [False] * len(ids) + [True]
    assert [token.logprob for token in tokens] == [logprob_of(token.id) for token in tokens]


def test_huggingface_client_streams(live: LiveServer) -> None:
    answer_with(live, "Hello, world! 😀")
    client = InferenceClient(live.url)
    assert "".join(client.text_generation("Hi", stream=True)) == "Hello, world! 😀<|im_end|>"  # as from TGI itself
    events = list(client.text_generation("Hi", stream=True, details=True, return_full_text=False, max_new_tokens=50))
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    assert all(event.generated_text is None and event.details is None for event in events[:-1])
    last = events[-1]
    assert last.generated_text == "Hello, world! 😀"
    assert last.details is not None
    assert (last.details.finish_reason, last.details.generated_tokens) == ("eos_token", len(events))


async def test_asynchronous_huggingface_client(live: LiveServer) -> None:
    client = AsyncInferenceClient(live.url)
    assert await client.text_generation("Hi", return_full_text=False) == "Hello, world!"
    pieces = [piece async for piece in await client.text_generation("Hi", stream=True)]
    assert "".join(pieces) == "Hello, world!<|im_end|>"


def test_huggingface_client_raises_the_errors_of_its_own(live: LiveServer) -> None:
    client = InferenceClient(live.url)
    with pytest.raises(ValidationError, match="`temperature` must be strictly positive"):
        client.text_generation("Hi", temperature=0.0)
    live.double.refuse = RequestError(ErrorCode.OVERLOADED, "the queue is full")
    with pytest.raises(OverloadedError):
        client.text_generation("Hi")
    with pytest.raises(OverloadedError):
        list(client.text_generation("Hi", stream=True))


def test_plain_answer_has_no_details_key(live: LiveServer) -> None:
    response = post(live, "/generate", {"inputs": "Hello"})
    assert response.json() == {"generated_text": "Hello, world!"}
    assert post(live, "/", {"inputs": "Hi"}).json() == [{"generated_text": "HiHello, world!"}]
    body = {"inputs": "Hi", "parameters": {"return_full_text": False}}
    assert post(live, "/", body).json() == [{"generated_text": "Hello, world!"}]


def test_bodies_match_the_published_models(live: LiveServer) -> None:
    GenerateResponse.model_validate(generate(live, details=True).json(), strict=True)
    for event in frames(post(live, "/generate_stream", {"inputs": "Hello", "parameters": {"details": True}})):
        StreamResponse.model_validate(event, strict=True)
    Info.model_validate(httpx.get(live.url + "/info").json(), strict=True)
    ErrorResponse.model_validate(generate(live, top_k=0).json(), strict=True)


def test_generate_ignores_stream_and_unknown_keys(live: LiveServer) -> None:
    response = post(live, "/generate", {"inputs": "Hello", "stream": True, "model": "x", "parameters": {"foo": [1]}})
    assert response.json() == {"generated_text": "Hello, world!"}


@pytest.mark.parametrize(
    ("parameters", "sampled"),
    [
        (None, True),
        ({}, False),
        ({"max_new_tokens": 5}, False),
        ({"do_sample": False}, False),
        ({"do_sample": True}, True),
        ({"temperature": 1.0}, False),
        ({"temperature": 0.7}, True),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
        ({"top_p": 1.0}, False),
        ({"seed": 5}, False),
    ],
)
def test_when_tokens_are_sampled(live: LiveServer, parameters: dict[str, Any] | None, sampled: bool) -> None:
    body: dict[str, Any] = {"inputs": "Hello"} | ({} if parameters is None else {"parameters": parameters})
    assert post(live, "/generate", body).status_code == 200
    sampling = last_sampling(live)
    assert (sampling.temperature > 0) is sampled
    # The model's own default (20) is not TGI's.
    assert sampling.top_k == ((parameters or {}).get("top_k", -1) if sampled else 1)


def test_every_sampling_value_arrives(live: LiveServer) -> None:
    seed = random.getrandbits(64)
    response = generate(
        live,
        do_sample=True,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        seed=seed,
        max_new_tokens=9,
        details=True,
    )
    assert response.json()["details"]["seed"] == seed
    sampling = last_sampling(live)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.25)
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.penalize_prompt) == (1.5, -0.5, True)
    assert (sampling.seed, sampling.max_new_tokens, sampling.logprobs) == (seed, 9, LogprobMode.WARPED)
    assert set(live.state.tokenizer.eos_token_ids) <= set(sampling.stop_token_ids or ())


def test_greedy_answers_show_no_seed_and_random_ones_do(live: LiveServer) -> None:
    assert generate(live, details=True, seed=3).json()["details"]["seed"] is None
    drawn = generate(live, details=True, do_sample=True).json()["details"]["seed"]
    assert drawn == last_sampling(live).seed


def test_length_is_100_unless_given_and_null_fills_the_context(live: LiveServer) -> None:
    generate(live)
    assert last_sampling(live).max_new_tokens == 100
    generate(live, max_new_tokens=None)
    prompt = len(live.double.submits[-1].text.tokens.prompt)
    assert last_sampling(live).max_new_tokens == live.double.max_model_len - prompt
    cut = generate(live, max_new_tokens=2, details=True).json()
    assert (cut["details"]["finish_reason"], cut["details"]["generated_tokens"]) == ("length", 2)


def test_length_comes_before_end_of_sequence(live: LiveServer) -> None:
    count = len(encode(live.state.tokenizer, "Hello, world!")) + 1
    details = generate(live, max_new_tokens=count, details=True).json()["details"]
    assert (details["finish_reason"], details["tokens"][-1]["special"]) == ("length", True)
    assert generate(live, max_new_tokens=count + 1, details=True).json()["details"]["finish_reason"] == "eos_token"


@pytest.mark.parametrize("stop", [[", w"], ", w", ["nowhere", ", w"]])
def test_stop_text_is_kept_and_what_follows_is_cut(live: LiveServer, stop: Any) -> None:
    found = generate(live, stop=stop, details=True).json()
    assert found["generated_text"] == "Hello, w"
    assert found["details"]["finish_reason"] == "stop_sequence"
    streamed = frames(post(live, "/generate_stream", {"inputs": "Hello", "parameters": {"stop": stop}}))
    assert streamed[-1]["generated_text"] == "Hello, w"
    assert len(streamed) == found["details"]["generated_tokens"]


def test_truncate_keeps_the_last_tokens(live: LiveServer) -> None:
    text = "The quick brown fox jumps over the lazy dog"
    ids = encode(live.state.tokenizer, text)
    response = post(live, "/generate", {"inputs": text, "parameters": {"truncate": 4, "return_full_text": True}})
    assert response.json()["generated_text"] == text + "Hello, world!"
    assert live.double.submits[-1].text.tokens.prompt.tolist() == ids[-4:]
    assert post(live, "/generate", {"inputs": MANY, "parameters": {"truncate": 30}}).status_code == 200


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0}, "`temperature` must be strictly positive"),
    ({"temperature": -1.5}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.01}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": 1.1}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 1}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"top_k": -1}, "`top_k` must be strictly positive"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 255. Given: 0"),
    ({"truncate": 256}, "`truncate` must be strictly positive and less than 255. Given: 256"),
    ({"best_of": 3, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ({"best_of": 0}, "`best_of` must be > 0 and <= 2. Given: 0"),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"best_of": 2, "top_k": 3, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
    ({"temperature": 0, "top_k": 0, "stop": list("abcde")}, "`temperature` must be strictly positive"),
    ({"top_k": 0, "top_p": 3, "max_new_tokens": 0}, "`top_p` must be"),
    ({"max_new_tokens": 0, "top_k": -3}, "`top_k` must be"),
    ({"best_of": 3, "temperature": -1}, "`best_of` must be"),
    ({"stop": [""]}, "`stop`"),
    ({"grammar": {"type": "regex", "value": "a("}}, "grammar cannot be enforced: unclosed group"),
    ({"grammar": {"type": "json", "value": {"type": "odd"}}}, "grammar cannot be enforced: Invalid type: odd"),
    ({"grammar": {"type": "regex", "value": {}}}, "`grammar` must be {type: json"),
    ({"grammar": {"type": "lark", "value": "a"}}, "`grammar` must be {type: json"),
    ({"adapter_id": "a"}, "`adapter_id` must name a loaded adapter (none). Given: 'a'"),
]


def test_values_are_refused_in_upstreams_words(live: LiveServer) -> None:
    for parameters, words in ERRORS:
        response = generate(live, **parameters)
        assert response.status_code == 422, parameters
        error = response.json()
        assert set(error) == {"error", "error_type"}
        assert error["error"].startswith(f"Input validation error: {words}"), (parameters, error)
        assert error["error_type"] == "validation"
    assert not live.double.submits


def test_what_no_is_said_to_is_accepted(live: LiveServer) -> None:
    response = generate(
        live,
        best_of=1,
        decoder_input_details=False,
        top_n_tokens=0,
        typical_p=None,
        watermark=False,
        grammar=None,
        adapter_id=None,
    )
    assert response.status_code == 200


def test_streams_refuse_more(live: LiveServer) -> None:
    for parameters, words in [
        ({"best_of": 2}, "`best_of` != 1 is not supported when streaming tokens"),
        (
            {"decoder_input_details": True},
            "`decoder_input_details` == true is not supported when streaming tokens",
        ),
        ({"temperature": 0}, "`temperature` must be strictly positive"),
    ]:
        for path, extra in (("/generate_stream", {}), ("/", {"stream": True})):
            response = post(live, path, {"inputs": "Hello", "parameters": parameters, **extra})
            assert (response.status_code, response.json()["error"]) == (422, f"Input validation error: {words}")


def test_lengths_that_do_not_fit(live: LiveServer) -> None:
    count = len(encode(live.state.tokenizer, MANY))
    assert count > 256
    texts = {
        "": ("`inputs` cannot be empty", {}),
        "Hello": (
            "`inputs` tokens + `max_new_tokens` must be <= 256. Given: 3 `inputs` tokens and 254 ",
            {"max_new_tokens": 254},
        ),
        MANY: (f"`inputs` tokens + `max_new_tokens` must be <= 256. Given: {count} `inputs` tokens and 100 ", {}),
    }
    for inputs, (words, parameters) in texts.items():
        response = post(live, "/generate", {"inputs": inputs, "parameters": parameters})
        assert response.status_code == 422
        assert response.json()["error"].startswith(f"Input validation error: {words}"), response.text
    null = post(live, "/generate", {"inputs": MANY, "parameters": {"max_new_tokens": None}})
    assert null.status_code == 422
    assert post(live, "/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 253}}).status_code == 200


MALFORMED: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b'"text"', 400),
    (b'{"inputs": "\xff"}', 400),
    (b'{"inputs": "\\ud800"}', 400),
    (b'{"inputs": "a", "parameters": {"temperature": NaN}}', 400),
    (b'{"inputs": "a", "parameters": {"temperature": 1e999}}', 400),
    (b'{"inputs": ' + b"[" * 100_000, 400),
    (b'{"inputs": 3}', 422),
    (b'{"inputs": null}', 422),
    (b'{"inputs": ["a"]}', 422),
    (b'{"inputs": "a", "parameters": []}', 422),
    (b'{"inputs": "a", "parameters": {"temperature": "hot"}}', 422),
    (b'{"inputs": "a", "parameters": {"temperature": true}}', 422),
    (b'{"inputs": "a", "parameters": {"top_k": 1.5}}', 422),
    (b'{"inputs": "a", "parameters": {"top_k": 9999999999}}', 422),
    (b'{"inputs": "a", "parameters": {"seed": -1}}', 422),
    (b'{"inputs": "a", "parameters": {"seed": 18446744073709551616}}', 422),
    (b'{"inputs": "a", "parameters": {"max_new_tokens": -1}}', 422),
    (b'{"inputs": "a", "parameters": {"stop": [1]}}', 422),
    (b'{"parameters": {}}', 422),
]


def test_malformed_bodies(live: LiveServer) -> None:
    for path in ("/", "/generate_stream"):
        for body, status in MALFORMED:
            response = HTTP.post(live.url + path, content=body)
            assert response.status_code == status, (body[:60], response.text)
            error = response.json()
            assert set(error) == {"error", "error_type"}
            assert error["error_type"] == "validation"
            start = (
                "Failed to parse the request body as JSON" if status == 400 else "Failed to deserialize the JSON body"
            )
            assert error["error"].startswith(start)
    assert "`inputs`" in httpx.post(live.url + "/generate", content=b'{"parameters": {}}').json()["error"]
    wrong = httpx.post(live.url + "/generate", content=b'{"inputs": "a", "parameters": {"stop": [1]}}')
    assert "parameters.stop[0]" in wrong.json()["error"]


@pytest.mark.parametrize(
    ("code", "status", "kind", "words"),
    [
        (ErrorCode.OVERLOADED, 429, "overloaded", "Model is overloaded"),
        (ErrorCode.FAILED, 424, "generation", "Request failed during generation: out of luck"),
        (ErrorCode.UNAVAILABLE, 503, "unavailable", "out of luck"),
        (ErrorCode.INVALID, 422, "validation", "Input validation error: out of luck"),
        (ErrorCode.TOO_LONG, 422, "validation", "Input validation error: out of luck"),
    ],
)
def test_refusals_of_the_scheduler(live: LiveServer, code: str, status: int, kind: str, words: str) -> None:
    live.double.refuse = RequestError(code, "out of luck")
    for path in ("/generate", "/generate_stream", "/"):
        response = post(live, path, {"inputs": "Hello"})
        assert (response.status_code, response.json()) == (status, {"error": words, "error_type": kind})
        assert ("retry-after" in response.headers) is (status in (429, 503))


def test_failure_after_the_first_token_is_the_last_event(live: LiveServer) -> None:
    live.double.step_seconds = 0.05
    with httpx.stream("POST", live.url + "/generate_stream", json={"inputs": "Hello"}) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["index"] == 1
        handle = live.double.submits[-1].handle
        failed = Results(
            live.double.incarnation,
            np.array([handle], np.int32),
            np.array([-1], np.int32),
            np.array([Finish.FAILED], np.int8),
            errors={handle: RequestError(ErrorCode.FAILED, "the device is gone")},
        )
        live.double.send_raw(to_wire(failed))
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert response.status_code == 200
    assert events[-1] == {"error": "Request failed during generation: the device is gone", "error_type": "generation"}
    assert all(event["generated_text"] is None for event in events[:-1])


def test_answer_that_ends_early_is_incomplete(live: LiveServer) -> None:
    live.double.step_seconds = 0.05
    with httpx.stream("POST", live.url + "/generate_stream", json={"inputs": "Hello"}) as response:
        lines = response.iter_lines()
        next(lines)
        ended = Results(
            live.double.incarnation,
            np.array([live.double.submits[-1].handle], np.int32),
            np.array([-1], np.int32),
            np.array([Finish.CANCELLED], np.int8),
        )
        live.double.send_raw(to_wire(ended))
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert events[-1] == {"error": "Incomplete generation", "error_type": "incomplete_generation"}


def test_headers_tell_the_times(live: LiveServer) -> None:
    live.double.step_seconds = 0.01
    headers = post(live, "/generate", {"inputs": "Größe"}).headers
    tokens = len(encode(live.state.tokenizer, "Hello, world!")) + 1
    assert headers["x-compute-type"] == "cpu+optimized"
    assert headers["x-compute-characters"] == "5"
    assert int(headers["x-prompt-tokens"]) == len(encode(live.state.tokenizer, "Größe"))
    assert int(headers["x-generated-tokens"]) == tokens
    parts = [int(headers[f"x-{name}-time"]) for name in ("validation", "queue", "inference")]
    assert abs(sum(parts) - int(headers["x-total-time"])) <= 20
    assert int(headers["x-inference-time"]) >= 10 * (tokens - 2)
    assert float(headers["x-compute-time"]) * 1000 == pytest.approx(int(headers["x-total-time"]), abs=1)
    assert int(headers["x-time-per-token"]) >= 5
    streamed = post(live, "/generate_stream", {"inputs": "Größe"}).headers
    assert streamed["content-type"].startswith("text/event-stream")
    assert (streamed["x-compute-characters"], streamed["x-accel-buffering"]) == ("5", "no")


def test_info_says_what_is_true(live: LiveServer) -> None:
    info = httpx.get(live.url + "/info").json()
    assert (info["max_input_tokens"], info["max_total_tokens"]) == (255, 256)
    assert (info["max_best_of"], info["max_stop_sequences"]) == (2, 4)
    assert info["max_concurrent_requests"] == 16 + live.state.settings.max_queued
    assert info["model_pipeline_tag"] == "text-generation"
    assert InferenceClient(provider="hf-inference").get_endpoint_info(model=live.url) == info


def test_tokenize_gives_places_in_the_text(live: LiveServer) -> None:
    text = "Hello, Größe 日本 😀!"
    tokens = post(live, "/tokenize", {"inputs": text}).json()
    for token in tokens:
        SimpleToken.model_validate(token, strict=True)
    assert [token["id"] for token in tokens] == encode(live.state.tokenizer, text)
    for token in tokens:
        assert text[token["start"] : token["stop"]] == token["text"]
    assert (tokens[0]["start"], tokens[-1]["stop"]) == (0, len(text))
    last = post(live, "/tokenize", {"inputs": text, "parameters": {"truncate": 2}}).json()
    assert last == tokens[-2:]
    assert post(live, "/tokenize", {"inputs": 3}).status_code == 422


def test_a_server_without_a_model_says_so(live: LiveServer) -> None:
    live.double.max_model_len = 0
    live.double.ready = False
    live.double.wait(lambda: not live.state.engine.health().ready)
    live.state.engine.model.max_model_len = 0  # no worker was ever there
    for response in (post(live, "/generate", {"inputs": "Hello"}), httpx.get(live.url + "/info")):
        assert (response.status_code, response.json()["error_type"]) == (503, "unavailable")
    with pytest.raises(UnknownError, match="not loaded"):
        InferenceClient(live.url).text_generation("Hi")


def test_unset_parameters_are_the_schemas_defaults() -> None:
    assert GenerateRequest.model_validate({"inputs": "a"}).effective.do_sample is True
    assert GenerateRequest.model_validate({"inputs": "a", "parameters": None}).effective.do_sample is True
    assert GenerateRequest.model_validate({"inputs": "a", "parameters": {}}).effective.do_sample is None
