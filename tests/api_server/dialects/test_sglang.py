"""SGLang's native dialect over HTTP, on the scheduler double: single and batch forms, frames, errors."""

from __future__ import annotations

import itertools
import json
import secrets
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from api_server.dialects.sglang.info import ModelInfo, ServerInfo, redacted
from api_server.dialects.sglang.schema import ErrorResponse, GenerateResponse
from interfaces.messages import Submit
from interfaces.request.sampling import LogprobMode, SamplingParams
from interfaces.result.results import ErrorCode, RequestError
from tests.api_server.conftest import LiveServer, encode, leave_when
from tests.api_server.scheduler_double import logprob_of

META = {
    "id",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "reasoning_tokens",
    "weight_version",
}

HTTP = httpx.Client(timeout=90)


def post(live: LiveServer, body: Any, path: str = "/generate") -> httpx.Response:
    return HTTP.post(live.url + path, json=body)


def sample(live: LiveServer, **values: Any) -> httpx.Response:
    return post(live, {"text": "Hello", "sampling_params": values})


def last_sampling(live: LiveServer) -> SamplingParams:
    return live.double.submits[-1].text.sampling_params


def frames(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def echo(live: LiveServer) -> Callable[[Submit], list[int]]:
    """Answers each prompt with itself."""
    return lambda submit: [*submit.text.tokens.prompt.tolist(), live.state.tokenizer.eos_token_ids[0]]


def test_single_answer(live: LiveServer) -> None:
    tokenizer = live.state.tokenizer
    live.double.cached = 2
    response = post(live, {"text": "Hello", "model": "whatever", "unknown": 1})
    answer = response.json()
    GenerateResponse.model_validate(answer)
    ids = [*encode(tokenizer, "Hello, world!"), tokenizer.eos_token_ids[0]]
    assert set(answer) == {"text", "output_ids", "meta_info"}
    assert (answer["text"], answer["output_ids"]) == ("Hello, world!", ids)
    meta = answer["meta_info"]
    assert set(meta) == META | {"e2e_latency"}
    assert meta["finish_reason"] == {"type": "stop", "matched": tokenizer.eos_token_ids[0]}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(encode(tokenizer, "Hello")), len(ids))
    assert (meta["cached_tokens"], meta["weight_version"]) == (2, "default")
    assert 0 < meta["e2e_latency"] < 20
    assert meta["id"] == response.headers["x-request-id"]


def test_guesses_are_counted_in_the_answer(live: LiveServer) -> None:
    live.double.guesses = [9, 3]
    answer = post(live, {"text": "Hello", "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}).json()
    GenerateResponse.model_validate(answer)
    meta = answer["meta_info"]
    passes = meta["completion_tokens"] - 3
    assert meta["spec_verify_ct"] == passes > 0
    assert meta["spec_accept_length"] == pytest.approx(meta["completion_tokens"] / passes)
    assert meta["spec_accept_rate"] == pytest.approx(1 / 3)
    assert (meta["spec_num_proposed_drafts"], meta["spec_num_correct_drafts"]) == (9, 3)


def test_put_is_post_and_ids_are_text(live: LiveServer) -> None:
    ids = encode(live.state.tokenizer, "Hello")
    live.double.answer = echo(live)
    answer = httpx.put(live.url + "/generate", json={"input_ids": ids, "return_prompt_token_ids": True}).json()
    assert (answer["text"], answer["prompt_token_ids"]) == ("Hello", ids)


@pytest.mark.parametrize("form", ["text", "input_ids"])
def test_batches_keep_their_order(live: LiveServer, form: str) -> None:
    tokenizer = live.state.tokenizer
    live.double.answer = echo(live)
    texts = [secrets.token_hex(count) for count in (1, 9, 3, 5)]
    prompts = texts if form == "text" else [encode(tokenizer, text) for text in texts]
    answers = post(live, {form: prompts, "rid": "r"}).json()
    assert [answer["text"] for answer in answers] == texts
    assert [answer["meta_info"]["id"] for answer in answers] == ["r_0", "r_1", "r_2", "r_3"]
    assert len({answer["meta_info"]["id"] for answer in post(live, {form: prompts}).json()}) == 4
    one = post(live, {form: prompts[:1]}).json()
    assert [answer["text"] for answer in one] == texts[:1]


def test_values_of_a_batch_come_once_or_as_lists(live: LiveServer) -> None:
    values = [{"max_new_tokens": 3, "temperature": 0.5}, {"top_k": 4}]
    body = {"text": ["a", "b"], "sampling_params": values, "rid": ["x", "y"], "return_logprob": [False, True]}
    answers = post(live, body).json()
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y"]
    assert ["output_token_logprobs" in answer["meta_info"] for answer in answers] == [False, True]
    first, second = (submit.text.sampling_params for submit in live.double.submits[-2:])
    assert (first.max_new_tokens, first.temperature, second.max_new_tokens, second.top_k) == (3, 0.5, 128, 4)
    post(live, {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 7}})
    assert [submit.text.sampling_params.max_new_tokens for submit in live.double.submits[-2:]] == [7, 7]


def test_several_answers_to_one_prompt(live: LiveServer) -> None:
    answers = post(live, {"text": ["a", "b"], "sampling_params": {"n": 3, "sampling_seed": 5}}).json()
    assert len(answers) == 6
    assert len({answer["meta_info"]["id"] for answer in answers}) == 6
    seeds = [submit.text.sampling_params.seed for submit in live.double.submits]
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]
    assert seeds[0] == 5
    assert len(post(live, {"text": "a", "sampling_params": {"n": 2}}).json()) == 2


def test_stream_carries_the_whole_text_so_far(live: LiveServer) -> None:
    tokenizer = live.state.tokenizer
    live.double.answer = lambda _: [*encode(tokenizer, "Größe 日本 😀"), tokenizer.eos_token_ids[0]]
    body = {"text": "Hello", "stream": True, "return_logprob": True, "return_text_in_logprobs": True}
    events = frames(post(live, body))
    assert len(events) > 2
    for before, after in itertools.pairwise(events):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        assert "�" not in before["text"]
        assert set(before["meta_info"]) >= META
        assert "e2e_latency" not in before["meta_info"]
    last = events[-1]
    GenerateResponse.model_validate(last)
    assert "index" not in last
    assert last["text"] == "Größe 日本 😀"
    assert last["meta_info"]["finish_reason"]["type"] == "stop"
    entries = last["meta_info"]["output_token_logprobs"]
    assert [entry[:2] for entry in entries] == [[logprob_of(token), token] for token in last["output_ids"]]
    assert "".join(entry[2] for entry in entries) == "Größe 日本 😀<|im_end|>"
    assert last["meta_info"]["output_token_logprobs_length"] == len(entries)


def test_streams_of_batches_have_an_index(live: LiveServer) -> None:
    live.double.answer = echo(live)
    texts = ["quick brown", "fox", "Hello, world!"]
    final: dict[int, dict[str, Any]] = {}
    for event in frames(post(live, {"text": texts, "stream": True, "rid": "r"})):
        assert event["index"] not in final or final[event["index"]]["meta_info"]["finish_reason"] is None
        final[event["index"]] = event
    assert [final[i]["text"] for i in range(3)] == texts
    assert [final[i]["meta_info"]["id"] for i in range(3)] == ["r_0", "r_1", "r_2"]


def test_its_own_client_can_read_the_stream(live: LiveServer) -> None:
    """As SGLang's RuntimeEndpoint does: exact last line, and the text sliced by position."""
    body = {"text": "Hello", "stream": True, "sampling_params": {"spaces_between_special_tokens": True}}
    position, pieces = 0, []
    with httpx.stream("POST", live.url + "/generate", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            if line == "data: [DONE]":
                break
            data = json.loads(line[5:].strip("\n"))
            pieces.append(data["text"][position:])
            position += len(pieces[-1])
    assert "".join(pieces) == "Hello, world!"


def test_every_sampling_value_arrives(live: LiveServer) -> None:
    response = sample(
        live,
        max_new_tokens=9,
        min_new_tokens=2,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        frequency_penalty=-0.5,
        presence_penalty=0.75,
        repetition_penalty=1.5,
        stop_token_ids=[33],
        logit_bias={"5": -1.5},
        sampling_seed=-1,
    )
    assert response.status_code == 200
    s = last_sampling(live)
    assert (s.max_new_tokens, s.min_new_tokens, s.temperature, s.top_p, s.top_k) == (9, 2, 0.5, 0.25, 7)
    assert (s.min_p, s.frequency_penalty, s.presence_penalty, s.repetition_penalty) == (0.125, -0.5, 0.75, 1.5)
    assert set(s.stop_token_ids or ()) == {33, *live.state.tokenizer.eos_token_ids}
    assert (s.logit_bias, s.seed, s.penalize_prompt) == ({5: -1.5}, 2**64 - 1, False)
    assert s.logprobs == LogprobMode.NONE
    post(live, {"text": "a", "return_logprob": True})
    assert last_sampling(live).logprobs == LogprobMode.TEMPERED


def test_defaults(live: LiveServer) -> None:
    for body in ({"text": "Hello"}, {"text": "Hello", "sampling_params": {"temperature": None, "top_k": None}}):
        assert post(live, body).status_code == 200
        s = last_sampling(live)
        assert (s.max_new_tokens, s.temperature, s.top_k, s.top_p) == (128, 1.0, -1, 1.0)
    sample(live, temperature=1e-7)
    assert last_sampling(live).temperature == 0
    sample(live, max_new_tokens=None)
    assert last_sampling(live).max_new_tokens == 256 - len(live.double.submits[-1].text.tokens.prompt)


def test_default_length_is_cut_to_what_fits_and_zero_is_possible(live: LiveServer) -> None:
    ids = [50] * 200
    post(live, {"input_ids": ids})
    assert last_sampling(live).max_new_tokens == 56
    answer = post(live, {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}}).json()
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_stops(live: LiveServer) -> None:
    tokenizer = live.state.tokenizer
    ids = encode(tokenizer, "Hello, world!")
    cut = sample(live, stop=["nowhere", ", w"]).json()
    assert cut["text"] == "Hello"
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": ", w"}
    assert tokenizer._backend.decode(cut["output_ids"]).startswith("Hello, w")
    assert sample(live, stop=", w", no_stop_trim=True).json()["text"] == "Hello, w"
    by_id = sample(live, stop_token_ids=[ids[2]]).json()
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[2]}
    assert by_id["output_ids"] == ids[:3]
    assert by_id["text"] == tokenizer._backend.decode(ids[:2])
    length = sample(live, max_new_tokens=2).json()
    assert length["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    sample(live, ignore_eos=True, stop_token_ids=[5], max_new_tokens=20)
    assert last_sampling(live).stop_token_ids == []
    on = sample(live, ignore_eos=True, max_new_tokens=20, skip_special_tokens=False).json()
    assert on["meta_info"]["completion_tokens"] == 20
    assert "<|im_end|>" in on["text"]


SAMPLING_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
    ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens must be in [0, max_new_tokens(8)]"),
    ({"min_new_tokens": -1}, "min_new_tokens must be in [0, max_new_tokens(128)]"),
    ({"temperature": -0.1}, "temperature must be a non-negative finite number"),
    ({"top_p": 0}, "top_p must be in (0, 1]"),
    ({"top_p": 1.5}, "top_p must be in (0, 1]"),
    ({"top_k": 0}, "top_k must be -1 (disable) or at least 1"),
    ({"top_k": -2}, "top_k must be -1 (disable) or at least 1"),
    ({"min_p": 1.5}, "min_p must be in [0, 1]"),
    ({"frequency_penalty": 3}, "frequency_penalty must be in [-2, 2]"),
    ({"presence_penalty": -3}, "presence_penalty must be in [-2, 2]"),
    ({"repetition_penalty": 0}, "repetition_penalty must be in (0, 2]"),
    ({"repetition_penalty": 2.5}, "repetition_penalty must be in (0, 2]"),
    ({"stop": ["a"] * 33}, "at most 32 stop strings are allowed"),
    ({"stop": ""}, "stop must not contain an empty text"),
    ({"stop_regex": ["a"] * 33}, "at most 32 stop_regex patterns are allowed"),
    ({"stop_regex": "é" * 129}, "a stop_regex pattern is over the 256-byte limit"),
    ({"stop_regex": r"(a)\1"}, r"invalid stop_regex '(a)\\1': invalid escape sequence"),
    ({"stop_regex": ["a", r"\w{1001}"]}, "invalid stop_regex"),
    ({"stop_regex": [""]}, "stop_regex must not contain an empty pattern"),
    ({"n": 0}, "n must be at least 1"),
    ({"logit_bias": {"1000000": 1}}, "logit_bias must has keys in [0, "),
    ({"logit_bias": {"-1": 1}}, "logit_bias must has keys in [0, "),
    ({"logit_bias": {"a": 1}}, "logit_bias must has keys in [0, "),
    ({"logit_bias": {"²": 1}}, "logit_bias must has keys in [0, "),
    ({"sampling_seed": 2**63}, "sampling_seed must be an integer in [-2**63, 2**63 - 1]"),
    ({"regex": "a", "json_schema": "{}"}, "Only one of json_schema, regex, ebnf, or structural_tag can be set."),
    ({"max_tokens": 5}, "unknown field `max_tokens`, expected one of `max_new_tokens`"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids contains token id 1000000"),
    ({"regex": "a(?=b)"}, "regex cannot be enforced: look-around"),
    ({"json_schema": '{"not": {"type": "null"}}'}, "json_schema cannot be enforced: the schema has not, which"),
    ({"json_schema": "{"}, "json_schema cannot be enforced: it is not JSON"),
    ({"ebnf": "root ::= x"}, "ebnf cannot be enforced: the rule root uses x, which is not there"),
    ({"structural_tag": "{}"}, "structural_tag cannot be enforced: it must have format"),
    *(({name: value}, f"{name}: a value is not supported") for name, value in [
        ("beam_width", 2),
    ]),
]  # fmt: skip


def test_any_finite_temperature_is_taken(live: LiveServer) -> None:
    for value in (2.5, 1e300):
        assert sample(live, temperature=value).status_code == 200
        assert last_sampling(live).temperature == value


def test_sampling_values_are_refused_in_upstreams_words(live: LiveServer) -> None:
    for values, words in SAMPLING_ERRORS:
        for body in ({"text": "a", "sampling_params": values}, {"text": ["a"], "sampling_params": [values]}):
            for stream in (False, True):
                response = post(live, body | {"stream": stream})
                ErrorResponse.model_validate(response.json(), strict=True)
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (400, 400)
                assert error["message"].startswith(words), (values, error)
    assert not live.double.submits


REQUEST_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"text": "a", "input_ids": [1]}, "Either text, input_ids or input_embeds should be provided."),
    ({"input_ids": []}, "input_ids cannot be empty."),
    ({"input_ids": [[1], []]}, "input_ids cannot be empty."),
    ({"text": []}, "text cannot be empty."),
    ({"input_ids": [10**6]}, "prompt contains token id 1000000"),
    ({"input_ids": [-1]}, "prompt contains token id -1"),
    ({"input_ids": [2**70]}, "input_ids"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "The length of sampling_params should be equal to the batch size."),
    ({"text": ["a", "b"], "rid": ["x"]}, "The length of rid should be equal to the batch size."),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "Duplicate request IDs detected"),
    ({"text": ["a", "b"], "return_logprob": [True]}, "The length of return_logprob should be equal to the batch size."),
    (
        {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]},
        "The parallel_sample_num should be the same for all samples in sample params.",
    ),
    (
        {"text": ["a"], "sampling_params": {"n": 2}, "return_logprob": [True]},
        "Cannot use list return_logprob with parallel_sample_num > 1",
    ),
    ({"input_ids": [60] * 256}, "The input (256 tokens) is longer than the model's context length (256 tokens)."),
    (
        {"input_ids": [60] * 200, "sampling_params": {"max_new_tokens": 57}},
        "Requested token count exceeds the model's maximum context length of 256 tokens. You requested a total of 257",
    ),
    ({"text": ""}, "the prompt is empty"),
    (
        {"text": "a", "return_logprob": True, "logprob_start_len": 9},
        "the start of the log probabilities, 9, is higher than the number of input tokens (1)",
    ),
    ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len must be at least -1, got -2."),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": 65}, "top_logprobs_num must be in [0, 64], got 65."),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num must be in [0, 64], got -1."),
    ({"text": "a", "return_logprob": True, "token_ids_logprob": [-1]}, "token_ids_logprob must have ids in [0,"),
    ({"text": "a", "return_logprob": True, "token_ids_logprob": [1] * 1025}, "token_ids_logprob may name 1024 tokens"),
    (
        {"text": ["a", "b"], "return_logprob": True, "token_ids_logprob": [[1]]},
        "The length of token_ids_logprob should be equal to the batch size.",
    ),
    *(({"text": "a", name: value}, f"{name}: a value is not supported") for name, value in [
        ("image_data", "aGk="),
        ("video_data", ["x"]),
        ("audio_data", "x"),
    ]),
    ({"text": "a", "lora_path": "x"}, "Got LoRA adapter that has never been loaded: 'x'. Loaded adapters: none."),
    ({"text": ["a", "b"], "lora_path": [None]}, "The length of lora_path should be equal to the batch size."),
]  # fmt: skip


def test_requests_are_refused_by_name(live: LiveServer) -> None:
    for body, words in REQUEST_ERRORS:
        response = post(live, body)
        assert response.status_code == 400, (body, response.text)
        assert response.json()["error"]["message"].startswith(words), (body, response.text)
    assert not live.double.submits


def test_values_that_ask_for_nothing_are_accepted(live: LiveServer) -> None:
    body: dict[str, Any] = {
        "text": "a",
        "image_data": None,
        "lora_path": None,
        "token_ids_logprob": [],
        "return_hidden_states": False,
        "top_logprobs_num": 0,
        "logprob_start_len": -1,
        "session_params": None,
        "sampling_params": {"json_schema": "", "regex": None, "skip_special_tokens": True},
    }
    assert post(live, body).status_code == 200


def test_types_are_checked_and_named(live: LiveServer) -> None:
    for body, field in [
        ({"text": 3}, "text"),
        ({"text": ["a", 3]}, "text[1]"),
        ({"input_ids": ["a"]}, "input_ids[0]"),
        ({"input_ids": [1.5]}, "input_ids[0]"),
        ({"input_ids": [[1], ["x"]]}, "input_ids[1][0]"),
        ({"text": "a", "sampling_params": []}, "The length"),
        ({"text": "a", "sampling_params": 3}, "sampling_params"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"n": 1.5}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"stop": [1]}}, "sampling_params.stop[0]"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": "a", "rid": 5}, "rid"),
    ]:
        response = post(live, body)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert message.startswith(field) or "sampling_params is a list of 0" in message, (body, message)


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        (ErrorCode.OVERLOADED, 503, "The request queue is full."),
        (ErrorCode.UNAVAILABLE, 503, "out of luck"),
        (ErrorCode.FAILED, 500, "out of luck"),
        (ErrorCode.INVALID, 400, "out of luck"),
    ],
)
def test_refusals_of_the_scheduler(live: LiveServer, code: str, status: int, words: str) -> None:
    live.double.refuse = RequestError(code, "out of luck")
    for stream in (False, True):
        response = post(live, {"text": ["a", "b"], "stream": stream})
        assert (response.status_code, response.json()["error"]["code"]) == (status, status)
        assert response.json()["error"]["message"].startswith(words)


def test_a_request_id_is_taken_until_its_request_ends(live: LiveServer) -> None:
    live.double.hold.set()
    rid = secrets.token_hex(4)
    first: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: first.append(post(live, {"text": "a", "rid": rid})))
    thread.start()
    live.double.wait(lambda: live.double.submits)
    second = post(live, {"text": ["a", "b"], "rid": ["other", rid]})
    assert second.status_code == 400
    assert second.json()["error"]["message"].startswith("Duplicate request ID detected")
    live.double.hold.clear()
    thread.join(60)
    assert first[0].json()["meta_info"]["id"] == rid
    for _ in range(2):
        assert post(live, {"text": "a", "rid": rid, "stream": True}).status_code == 200


def test_a_client_that_leaves_frees_its_request_and_its_id(live: LiveServer) -> None:
    live.double.hold.set()
    leave_when(lambda: len(live.double.running) == 2, live, "/generate", {"text": ["a", "b"], "rid": "gone"})
    live.double.wait(lambda: len(live.double.cancelled) == 2)
    live.double.hold.clear()
    assert post(live, {"text": "a", "rid": "gone_0"}).status_code == 200


def test_tokenize(live: LiveServer) -> None:
    tokenizer = live.state.tokenizer
    text = "Hello, Größe 日本"
    ids = encode(tokenizer, text)
    assert post(live, {"prompt": text}, "/tokenize").json() == {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": 256,
    }
    several = post(live, {"prompt": [text, "a"], "model": "x"}, "/tokenize").json()
    assert (several["tokens"][0], several["count"][0], len(several["tokens"])) == (ids, len(ids), 2)
    chat = post(live, {"messages": [{"role": "user", "content": text}]}, "/tokenize").json()
    assert tokenizer._backend.decode(chat["tokens"], skip_special_tokens=False) == (
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )
    for body in ({"prompt": 3}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"messages": "x"}):
        assert post(live, body, "/tokenize").status_code == 400


def test_info_pages(live: LiveServer) -> None:
    model = httpx.get(live.url + "/get_model_info").json()
    assert model == httpx.get(live.url + "/model_info").json()
    ModelInfo.model_validate(model, strict=True)
    assert (model["served_model_name"], model["is_generation"]) == ("tiny-chat", True)
    server = httpx.get(live.url + "/get_server_info").json()
    ServerInfo.model_validate(server, strict=True)
    assert (server["page_size"], server["max_total_num_tokens"], server["max_req_input_len"]) == (16, 1600, 255)
    assert server["model_path"] == model["model_path"] == live.state.settings.model
    assert server["max_queued"] == live.state.settings.max_queued
    assert server["max_running_requests"] == 16
    (state,) = server["internal_states"]
    assert (state["effective_max_running_requests_per_dp"], state["step_tokens"]) == (16, 512)


def test_secrets_are_not_shown() -> None:
    facts = {"api_key": "x", "admin_api_key": "", "hf_token": "x", "max_batch_tokens": 5, "KEYFILE": "x", "port": 1}
    shown = redacted(facts)
    assert [name for name in facts if shown[name] != facts[name]] == ["api_key", "hf_token", "KEYFILE"]


def test_salts_reach_the_scheduler(live: LiveServer) -> None:
    post(live, {"text": ["a", "b"], "cache_salt": ["x", None], "extra_key": "k"})
    salts = [submit.text.cache_salt for submit in live.double.submits]
    assert len(set(salts)) == 2
    post(live, {"text": "a"})
    assert live.double.submits[-1].text.cache_salt == ""
