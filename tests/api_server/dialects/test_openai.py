"""OpenAI's dialect, with the real client against the real server."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import openai
import pytest

from api_server.dialects.openai.requests import _REFUSED
from api_server.dialects.openai.schema import ChatBody, CompletionBody, TextBody
from api_server.text.tokenizer import Tokenizer
from interfaces.messages import Submit
from interfaces.result.results import ErrorCode, RequestError
from interfaces.wire.codec import encode as encode_message
from tests.api_server.conftest import CORPUS, LiveServer, encode
from tests.api_server.scheduler_double import SchedulerDouble

UNICODE = "naïve 日本語のテキスト 👩‍👩‍👧 😀, Привет! مرحبا"
USER: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(live: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def async_client(live: LiveServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def says(double: SchedulerDouble, tokenizer: Tokenizer, text: str) -> None:
    """From now on the answer is `text`, byte by byte, then EOS."""
    alphabet = {value: i for i in range(tokenizer.vocab_size) if len(value := tokenizer._vocabulary.bytes_of(i)) == 1}
    ids = [alphabet[bytes([byte])] for byte in text.encode()]
    double.answer = lambda _: [*ids, tokenizer.eos_token_ids[0]]


def post(live: LiveServer, path: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(live.url + path, json=body, headers=headers, timeout=90)


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": USER, **more}


def test_chat(client: openai.OpenAI, live: LiveServer, tokenizer: Tokenizer) -> None:
    answer = client.chat.completions.create(model="tiny-chat", messages=USER)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello, world!", "stop")
    prompt = encode(tokenizer, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert live.double.submits[0].text.tokens.prompt.tolist() == prompt
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(encode(tokenizer, "Hello, world!")) + 1
    assert answer.system_fingerprint
    assert answer.id != client.chat.completions.create(model="", messages=USER).id


@pytest.mark.parametrize("text", ["Hello, world!", UNICODE, random.choice(CORPUS)[: random.randrange(1, 40)]])
async def test_streamed_text_is_the_text(
    async_client: openai.AsyncOpenAI, live: LiveServer, tokenizer: Tokenizer, text: str
) -> None:
    says(live.double, tokenizer, text)
    whole = await async_client.chat.completions.create(model="tgi", messages=USER, max_tokens=200)
    stream = await async_client.chat.completions.create(model="tgi", messages=USER, max_tokens=200, stream=True)
    chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.choices[0].message.content == text
    assert "�" not in "".join(pieces)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_stream_frames_are_exact(live: LiveServer) -> None:
    response = post(live, "/v1/chat/completions", chat(stream=True, stream_options={"include_usage": True}))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert (response.headers["cache-control"], response.headers["x-accel-buffering"]) == ("no-cache", "no")
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1
    plain = post(live, "/v1/chat/completions", chat(stream=True)).text
    assert "usage" not in plain


def test_usage_so_far_in_every_chunk(live: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = post(live, "/v1/completions", {"prompt": "x", "stream": True, "stream_options": options}).text
    usages = [json.loads(frame[6:])["usage"] for frame in text.split("\n\n") if frame.startswith("data: {")]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert counts[0] >= 1


def test_n_answers_with_seeds_that_follow_from_one(client: openai.OpenAI, live: LiveServer) -> None:
    double = live.double
    answer = client.chat.completions.create(model="", messages=USER, n=3, seed=-7)
    again = client.chat.completions.create(model="", messages=USER, n=3, seed=-7)
    seeds = [submit.text.sampling_params.seed for submit in double.submits]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert seeds[0] == 2**64 - 7
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]
    assert answer.usage is not None
    assert again.usage == answer.usage
    assert answer.usage.prompt_tokens == len(double.submits[0].text.tokens.prompt)
    stream = client.chat.completions.create(model="", messages=USER, n=3, stream=True)
    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["Hello, world!"] * 3


@pytest.mark.parametrize(
    ("stop", "more", "text"),
    [
        (" world", {}, "Hello,"),
        (["zzz", "lo, wor"], {}, "Hel"),
        (["world!!"], {}, "Hello, world!"),
        (" world", {"include_stop_str_in_output": True}, "Hello, world"),
        ("Hello", {"min_tokens": 3}, "Hello, world!"),
    ],
)
def test_stop_strings(live: LiveServer, tokenizer: Tokenizer, stop: Any, more: dict[str, Any], text: str) -> None:
    ids, eos = encode(tokenizer, "Hello, world!"), tokenizer.eos_token_ids[0]
    live.double.answer = lambda _: [*ids, eos] if more else [*ids, eos, *ids * 100]
    whole = post(live, "/v1/completions", {"prompt": "x", "stop": stop, "max_tokens": 100, **more}).json()
    assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (text, "stop")
    body = {"prompt": "x", "stop": stop, "max_tokens": 100, "stream": True, **more}
    frames = post(live, "/v1/completions", body).text.split("\n\n")
    chunks = [json.loads(frame[6:]) for frame in frames if frame.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


def test_a_stop_string_cancels_in_the_scheduler(live: LiveServer, tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "Hello, world!")
    live.double.answer = lambda _: ids
    answer = post(live, "/v1/completions", {"prompt": "x", "stop": "world!Hel", "max_tokens": 200}).json()
    assert answer["choices"][0]["text"] == "Hello, "
    live.double.wait(lambda: live.double.cancelled == [live.double.submits[0].handle])
    assert not live.double.running


def test_lengths(client: openai.OpenAI, live: LiveServer, tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "x")
    live.double.answer = lambda _: ids
    completion = client.completions.create(model="", prompt="abc")
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 16
    answer = client.chat.completions.create(model="", messages=USER, max_completion_tokens=5)
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("length", "xxxxx")
    answer = client.chat.completions.create(model="", messages=USER)
    assert answer.usage is not None
    assert answer.usage.total_tokens == live.double.max_model_len


def test_completion_prompts(client: openai.OpenAI, live: LiveServer, tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "the fox")
    for prompt, expected in (
        ("the fox", [ids]),
        (ids, [ids]),
        (["the fox", "x"], [ids, encode(tokenizer, "x")]),
        ([ids, [5, 6]], [ids, [5, 6]]),
    ):
        live.double.submits.clear()
        answer = client.completions.create(model="", prompt=prompt, n=2, echo=True)
        assert [s.text.tokens.prompt.tolist() for s in live.double.submits] == [p for p in expected for _ in range(2)]
        assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
        assert answer.choices[0].text == "the foxHello, world!"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, expected))


def test_echo_alone_needs_no_engine(client: openai.OpenAI, live: LiveServer) -> None:
    answer = client.completions.create(model="", prompt="the fox", echo=True, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("the fox", "length")
    stream = client.completions.create(model="", prompt="the fox", echo=True, max_tokens=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "the fox"
    assert not live.double.submits


def test_sampling_values_reach_the_scheduler(client: openai.OpenAI, live: LiveServer, tokenizer: Tokenizer) -> None:
    extra = {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2, "stop_token_ids": [9]}
    client.completions.create(
        model="", prompt="x", temperature=0.3, top_p=0.8, seed=5, presence_penalty=0.5, frequency_penalty=-0.5,
        logit_bias={"7": 3}, stop=["zz"], max_tokens=9, extra_body=extra | {"cache_salt": "pepper"},
    )  # fmt: skip
    submit = live.double.submits[0]
    got = submit.text.sampling_params
    assert (got.temperature, got.top_p, got.seed, got.presence_penalty) == (0.3, 0.8, 5, 0.5)
    assert (got.frequency_penalty, got.logit_bias, got.max_new_tokens) == (-0.5, {7: 3.0}, 9)
    assert (got.top_k, got.min_p, got.repetition_penalty, got.min_new_tokens) == (7, 0.1, 1.2, 2)
    assert set(got.stop_token_ids or ()) == {*tokenizer.eos_token_ids, 9}
    assert (got.stop, submit.text.cache_salt) == (["zz"], "pepper")


def test_values_beyond_the_model_are_cut_to_it(live: LiveServer) -> None:
    post(live, "/v1/completions", {"prompt": "x", "top_k": 2**40, "min_tokens": 2**40})
    sampling = live.double.submits[0].text.sampling_params
    assert (sampling.top_k, sampling.min_new_tokens, sampling.max_new_tokens) == (-1, 16, 16)


def test_defaults_of_the_model_and_ignore_eos(live: LiveServer, tokenizer: Tokenizer) -> None:
    post(live, "/v1/completions", {"prompt": "x"})
    answer = post(live, "/v1/completions", {"prompt": "x", "ignore_eos": True, "max_tokens": 12}).json()
    plain, ignoring = live.double.submits
    assert plain.text.sampling_params.top_k == ignoring.text.sampling_params.top_k == 20  # generation_config.json
    assert plain.text.sampling_params.temperature == 1.0
    assert set(plain.text.sampling_params.stop_token_ids or ()) == {0, tokenizer.eos_token_ids[0]}
    assert ignoring.text.sampling_params.stop_token_ids == []
    assert answer["usage"]["completion_tokens"] == 12


def test_template_options_and_tools(live: LiveServer, tokenizer: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}

    def prompt(**more: Any) -> str:
        answer = post(live, "/v1/chat/completions", chat(**more))
        assert answer.status_code == 200, answer.text
        return str(
            tokenizer._backend.decode(live.double.submits[-1].text.tokens.prompt.tolist(), skip_special_tokens=False)
        )

    assert "<tools>" in prompt(tools=[tool])
    assert "<tools>" not in prompt(tools=[tool], tool_choice="none")
    assert prompt(chat_template_kwargs={"enable_thinking": True}).endswith("<think>")
    assert prompt(add_generation_prompt=False).endswith("hi<|im_end|>\n")
    messages = [*USER, {"role": "assistant", "content": "It is"}]
    assert prompt(messages=messages, continue_final_message=True).endswith("assistant\nIt is")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    developer = {"role": "developer", "content": "be brief"}
    assert "system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<" in prompt(
        messages=[developer, {"role": "user", "content": parts}]
    )


@pytest.mark.parametrize("seed_of_request", range(3))
def test_cached_tokens_are_reported(client: openai.OpenAI, live: LiveServer, seed_of_request: int) -> None:
    live.double.cached = 4 + seed_of_request
    usage = client.chat.completions.create(model="", messages=USER, n=2).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 4 + seed_of_request


def test_models(client: openai.OpenAI, live: LiveServer) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny-chat", "tokenyard")
    assert client.models.retrieve("tiny-chat") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody/else")
    assert post(live, "/v1/chat/completions", chat(model=live.state.settings.model)).status_code == 200


def test_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=USER)
    assert caught.value.code == "model_not_found"
    assert "tiny-chat" in caught.value.message


def said(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


LONG = "fox " * 300


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {}, "messages"),
        ("chat/completions", chat(messages=[]), "messages"),
        ("chat/completions", chat(messages="hi"), "messages"),
        ("chat/completions", chat(messages=["hi"]), "messages[0]"),
        ("chat/completions", chat(messages=[{"role": "king", "content": "x"}]), "messages[0].role"),
        ("chat/completions", chat(messages=[{"role": "user"}]), "messages[0].content"),
        ("chat/completions", chat(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
        ("chat/completions", chat(messages=[said([{"type": "text"}])]), "messages[0].content[0].text"),
        ("chat/completions", chat(messages=[said([{"type": "image_url"}])]), "messages[0].content[0]"),
        ("chat/completions", chat(min_tokens=9, max_tokens=8), "min_tokens"),
        ("chat/completions", chat(temperature=3), "temperature"),
        ("chat/completions", chat(temperature="hot"), "temperature"),
        ("chat/completions", chat(top_p=-1), "top_p"),
        ("chat/completions", chat(n=0), "n"),
        ("chat/completions", chat(n=10**9), "n"),
        ("chat/completions", chat(max_tokens=0), "max_tokens"),
        ("chat/completions", chat(max_tokens=10**6), "max_tokens"),
        ("chat/completions", chat(max_tokens=1 << 70), "max_tokens"),
        ("chat/completions", chat(top_k=1 << 70), "top_k"),
        ("chat/completions", chat(min_tokens=1 << 70), "min_tokens"),
        ("chat/completions", chat(seed=1 << 70), "seed"),
        ("chat/completions", chat(logit_bias={"x": 1}), "logit_bias"),
        ("chat/completions", chat(logit_bias={"99999999": 1}), "logit_bias"),
        ("chat/completions", chat(logit_bias={"5": 101}), "logit_bias"),
        ("chat/completions", chat(stop_token_ids=[-1]), "stop_token_ids"),
        ("chat/completions", chat(stream_options={"include_usage": True}), "stream_options"),
        ("chat/completions", chat(logprobs=1), "logprobs"),
        ("chat/completions", chat(logprobs=True, top_logprobs=21), "top_logprobs"),
        ("chat/completions", chat(logprobs=True, top_logprobs=-1), "top_logprobs"),
        ("chat/completions", chat(top_logprobs=2), "top_logprobs"),
        ("chat/completions", chat(response_format={"type": "xml"}), "response_format"),
        ("chat/completions", chat(response_format={"type": "json_schema"}), "response_format"),
        ("chat/completions", chat(response_format={"type": "json_object"}, regex="a"), "regex"),
        ("chat/completions", chat(tool_choice="required"), "tool_choice"),
        ("chat/completions", chat(modalities=["text", "audio"]), "modalities"),
        ("chat/completions", chat(guided_json={"if": {"minLength": 2}, "then": {"maxLength": 3}}), "guided_json"),
        ("chat/completions", chat(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs"),
        ("chat/completions", chat(add_generation_prompt=True, continue_final_message=True), "continue_final_message"),
        ("chat/completions", chat(messages=[{"role": "user", "content": LONG}]), "prompt"),
        ("completions", {"prompt": "x", "guided_regex": "["}, "guided_regex"),
        ("completions", {"prompt": "x", "guided_choice": []}, "guided_choice"),
        ("completions", {"prompt": "x", "structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ("completions", {}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [[]]}, "prompt"),
        ("completions", {"prompt": 5}, "prompt"),
        ("completions", {"prompt": [1, "a"]}, "prompt"),
        ("completions", {"prompt": [10**6]}, "prompt"),
        ("completions", {"prompt": [1 << 70]}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt"),
        ("completions", {"prompt": "x", "best_of": 1, "n": 2}, "best_of"),
        ("completions", {"prompt": "x", "best_of": 0}, "best_of"),
        ("chat/completions", chat(best_of=3), "best_of"),
        ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
        ("completions", {"prompt": "x", "logprobs": True}, "logprobs"),
        ("completions", {"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ("completions", {"prompt": LONG}, "prompt"),
        ("completions", {"prompt": ["x"] * 2000}, "prompt"),
    ],
)  # fmt: skip
def test_bad_bodies_are_400_and_name_the_field(live: LiveServer, path: str, body: Any, param: str) -> None:
    for stream in (False, True):
        if stream and "stream_options" in body:
            continue
        response = post(live, f"/v1/{path}", body | {"stream": stream})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] is not None
        assert error["param"].startswith(param)
        assert error["type"] == "invalid_request_error"
        assert error["message"]
    assert not live.double.submits


def test_values_that_ask_for_nothing_are_accepted(live: LiveServer) -> None:
    nothing = {
        "logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}, "suffix": None, "best_of": 1,
        "modalities": ["text"], "audio": None, "tool_choice": "auto", "functions": None, "user": "u", "store": True,
        "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True, "stop": None, "n": None,
        "stream": None, "temperature": None, "unheard_of": 1, "echo": False,
    }  # fmt: skip
    assert post(live, "/v1/chat/completions", chat(**nothing)).status_code == 200


def test_prompt_too_long_names_the_numbers(client: openai.OpenAI, live: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="", prompt=[5] * 250, max_tokens=20)
    assert caught.value.code == "context_length_exceeded"
    for number in ("250", "20", "256", "6"):
        assert number in caught.value.message
    client.completions.create(model="", prompt=[5] * 250)  # the default length is cut to what fits
    assert live.double.submits[-1].text.sampling_params.max_new_tokens == 6
    client.completions.create(model="", prompt=[5] * 500 + [7], extra_body={"truncate_prompt_tokens": 3})
    assert live.double.submits[-1].text.tokens.prompt.tolist() == [5, 5, 7]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.OVERLOADED, 429),
        (ErrorCode.UNAVAILABLE, 503),
        (ErrorCode.TOO_LONG, 400),
        (ErrorCode.INVALID, 400),
        (ErrorCode.FAILED, 500),
        ("some new code", 500),
    ],
)
def test_refusals_of_the_scheduler_have_real_statuses_in_streams_too(live: LiveServer, code: str, status: int) -> None:
    live.double.refuse = RequestError(code, "because of this")
    for stream in (False, True):
        response = post(live, "/v1/chat/completions", chat(stream=stream))
        assert response.status_code == status
        assert response.json()["error"]["message"] == "because of this"
        assert ("retry-after" in response.headers) == (status in (429, 503))


async def test_a_failure_after_the_first_byte_is_an_event(live: LiveServer, async_client: openai.AsyncOpenAI) -> None:
    double = live.double
    double.answer = lambda _: [40]
    stream = await async_client.chat.completions.create(model="", messages=USER, stream=True, max_tokens=200)
    double.hold.set()
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    submit: Submit = double.submits[0]
    double.send_raw(encode_message(double._refusal(submit, RequestError(ErrorCode.FAILED, "the device is on fire"))))
    with pytest.raises(openai.APIError, match="on fire"):
        async for _ in stream:
            pass


@pytest.mark.slow
async def test_a_scheduler_restart_is_a_pause(async_client: openai.AsyncOpenAI, live: LiveServer) -> None:
    double = live.double
    double.step_seconds = 0.005
    ids = [random.randrange(3, 500) for _ in range(80)]
    double.answer = lambda _: ids
    whole = await async_client.completions.create(model="", prompt="x", max_tokens=80)
    stream = await async_client.completions.create(model="", prompt="x", max_tokens=80, stream=True)
    text, restarted = "", False
    async for chunk in stream:
        text += chunk.choices[0].text
        if len(text) > 10 and not restarted:
            restarted = True
            await asyncio.to_thread(double.restart)
    assert text == whole.choices[0].text
    assert len(double.submits) == 3
    assert len(double.submits[-1].text.tokens.generated)


def odd_value(depth: int = 0) -> Any:
    """Any JSON value, with a liking for the edges of numbers."""
    leaves = [
        None,
        True,
        False,
        0,
        1,
        -1,
        2**31,
        2**63 - 1,
        -(2**63),
        2**64 - 1,
        0.5,
        -0.0,
        1e308,
        "",
        "x",
        "1",
        "\0😀",
    ]
    if depth > 2 or random.random() < 0.6:
        return random.choice(leaves)
    items = [odd_value(depth + 1) for _ in range(random.randrange(3))]
    return items if random.random() < 0.5 else {random.choice(["role", "content", "type", "5"]): item for item in items}


@pytest.mark.parametrize(
    ("path", "model", "base"),
    [("chat/completions", ChatBody, chat(max_tokens=3)), ("completions", CompletionBody, {"prompt": "x"})],
)
def test_no_body_breaks_the_server(live: LiveServer, path: str, model: type[TextBody], base: dict[str, Any]) -> None:
    names = [*model.model_fields, *_REFUSED, "best_of", "response_format"]
    with httpx.Client(base_url=live.url) as client:
        for _ in range(400):
            body = base | {name: odd_value() for name in random.sample(names, random.randrange(1, 4))}
            response = client.post(f"/v1/{path}", json=body)
            assert response.status_code in (200, 400, 404), (body, response.text)
            assert "internal_error" not in response.text, body
    live.double.wait(lambda: not live.double.running)
