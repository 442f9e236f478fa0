"""/v1/responses, with OpenAI's real client against the real server."""

from __future__ import annotations

import random
from typing import Any

import httpx
import openai
import pytest

from api_server.dialects.openai.requests import _REFUSED
from api_server.dialects.openai.responses.input import REFUSED
from api_server.dialects.openai.responses.schema import ResponseAnswer, ResponseEvent, ResponsesBody
from api_server.text.tokenizer import Tokenizer
from interfaces.result.results import ErrorCode, RequestError
from interfaces.wire.codec import encode as encode_message
from tests.api_server.conftest import CORPUS, LiveServer, encode
from tests.api_server.dialects.test_anthropic import events_of, prompt_of
from tests.api_server.dialects.test_openai import LONG, UNICODE, odd_value, post, says

PATH = "/v1/responses"
CHANGING = {"id", "created_at", "completed_at", "output"}
"""Facts that differ between two answers to one request; ids are compared by their own test."""


@pytest.fixture
def client(live: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def async_client(live: LiveServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def test_answer(client: openai.OpenAI, live: LiveServer, tokenizer: Tokenizer) -> None:
    live.double.cached = cached = random.randrange(1, 9)
    answer = client.responses.create(
        model="tiny-chat", input="hi", instructions="be brief", metadata={"a": "b"}, temperature=0.5, user="u"
    )
    assert answer.output_text == "Hello, world!"
    (item,) = answer.output
    assert item.type == "message"
    assert (item.role, item.status, answer.status, answer.object) == ("assistant", "completed", "completed", "response")
    assert (answer.instructions, answer.metadata, answer.temperature) == ("be brief", {"a": "b"}, 0.5)
    assert answer.model_dump()["store"] is False
    assert prompt_of(live, tokenizer) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(live.double.submits[0].text.tokens.prompt)
    assert answer.usage.output_tokens == len(encode(tokenizer, "Hello, world!")) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.input_tokens_details.cached_tokens == cached
    assert answer.id != client.responses.create(model="", input="hi").id


def test_the_id_is_that_of_the_request(live: LiveServer) -> None:
    answer = post(live, PATH, {"input": "hi"}, **{"x-request-id": "mine-1"}).json()
    assert (answer["id"], answer["output"][0]["id"]) == ("resp_mine-1", "msg_mine-1_0")


@pytest.mark.parametrize("text", [UNICODE, random.choice(CORPUS)[: random.randrange(1, 40)]])
async def test_streamed_answer_is_the_answer(
    async_client: openai.AsyncOpenAI, live: LiveServer, tokenizer: Tokenizer, text: str
) -> None:
    says(live.double, tokenizer, text)
    asked: dict[str, Any] = {"model": "tgi", "input": "hi", "max_output_tokens": 200, "top_p": 0.5}
    whole = await async_client.responses.create(**asked)
    async with async_client.responses.stream(**asked) as stream:
        pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(pieces) == final.output_text == whole.output_text == text
    streamed, direct = (answer.model_dump(exclude=CHANGING) for answer in (final, whole))
    assert {name: streamed[name] for name in direct} == direct


@pytest.mark.parametrize(
    ("length", "status"), [(50, "completed"), (3, "incomplete")], ids=["to the end", "to the length"]
)
def test_events_are_exact(live: LiveServer, client: openai.OpenAI, length: int, status: str) -> None:
    body = {"input": "hi", "max_output_tokens": length}
    response = post(live, PATH, body | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", status]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert ResponseEvent.model_validate(event).model_dump(exclude_unset=True) == event
    text = "".join(event["delta"] for event in events[4:-4])
    final, whole = events[-1]["response"], post(live, PATH, body).json()
    for answer in (final, whole):
        assert ResponseAnswer.model_validate(answer).model_dump(exclude_unset=True) == answer
        assert answer["output"][0]["content"][0]["text"] == text == events[-4]["text"] == events[-3]["part"]["text"]
        assert answer["output"][0]["status"] == answer["status"] == status
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        assert answer["incomplete_details"] == reason
    assert {k: v for k, v in final.items() if k not in CHANGING} == {
        k: v for k, v in whole.items() if k not in CHANGING
    }
    assert (events[0]["response"]["status"], events[0]["response"]["usage"]) == ("in_progress", None)
    sent = [event.type for event in client.responses.create(model="", stream=True, **body)]  # type: ignore[call-overload]
    # On a busy machine tokens come together: how many deltas there are is no fact of the answer.
    assert list(dict.fromkeys(sent)) == list(dict.fromkeys(event["type"] for event in events))


def test_an_answer_can_be_sent_back(client: openai.OpenAI, live: LiveServer, tokenizer: Tokenizer) -> None:
    said: list[Any] = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    first = client.responses.create(model="", input=said)
    said += [item.model_dump() for item in first.output]
    parts = [{"type": "input_text", "text": "and"}, {"type": "input_text", "text": "now?"}]
    said.append({"type": "message", "role": "user", "content": parts})
    client.responses.create(model="", input=said)
    assert prompt_of(live, tokenizer) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nHello, world!<|im_end|>\n<|im_start|>user\nand\nnow?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_sampling_values_reach_the_scheduler(client: openai.OpenAI, live: LiveServer) -> None:
    extra = {"seed": 5, "top_k": 7, "stop": "zz", "presence_penalty": 0.5}
    client.responses.create(model="", input="x", temperature=0.3, top_p=0.8, max_output_tokens=9, extra_body=extra)
    got = live.double.submits[0].text.sampling_params
    assert (got.temperature, got.top_p, got.max_new_tokens) == (0.3, 0.8, 9)
    assert (got.seed, got.top_k, got.stop, got.presence_penalty) == (5, 7, ["zz"], 0.5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["hi"]}, "input"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": LONG}, "input"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"n": 2}, "n"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": ["custom"]}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": ["custom"]}}, "tool_choice"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"truncation": "sometimes"}, "truncation"),
        ({"include": ["reasoning.encrypted_content", "x"]}, "include"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"context_management": [{"type": "compaction", "compact_threshold": 2}]}, "context_management[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [5]}]}, "tools[0].tools"),
        ({"tools": [{"type": "custom", "name": "n", "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"prompt": {"id": "p"}}, "prompt"),
    ],
)  # fmt: skip
def test_bad_bodies_are_400_and_name_the_field(live: LiveServer, body: Any, param: str) -> None:
    for stream in (False, True):
        response = post(live, PATH, {"input": "hi", "stream": stream} | body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"].startswith(param)
        assert param in error["message"]
        assert param == "prompt" or "prompt" not in error["message"], "a field of another route"
    assert not live.double.submits


def test_values_that_ask_for_nothing_are_accepted(live: LiveServer) -> None:
    nothing: dict[str, Any] = {
        "store": False, "background": False, "previous_response_id": None, "tools": [], "tool_choice": "auto",
        "include": [], "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "truncation": "disabled",
        "parallel_tool_calls": True, "service_tier": "auto", "metadata": None, "max_output_tokens": None, "n": 1,
    }  # fmt: skip
    answer = post(live, PATH, {"input": "hi"} | nothing)
    assert answer.status_code == 200, answer.text
    assert answer.json()["reasoning"] == {"effort": "low", "summary": None}


@pytest.mark.parametrize(
    ("code", "status"), [(ErrorCode.OVERLOADED, 429), (ErrorCode.UNAVAILABLE, 503), (ErrorCode.FAILED, 500)]
)
def test_refusals_of_the_scheduler(client: openai.OpenAI, live: LiveServer, code: str, status: int) -> None:
    live.double.refuse = RequestError(code, "because of this")
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError, match="because of this") as caught:
            client.responses.create(model="", input="hi", stream=stream)
        assert caught.value.status_code == status


async def test_a_failure_after_the_first_byte_is_an_event(live: LiveServer, async_client: openai.AsyncOpenAI) -> None:
    double = live.double
    double.answer = lambda _: [40]
    stream = await async_client.responses.create(model="", input="hi", stream=True, max_output_tokens=200)
    double.hold.set()
    said = ""
    events: list[Any] = []
    async for event in stream:
        if event.type == "response.output_text.delta":
            said += event.delta
            if not events:
                refusal = double._refusal(double.submits[0], RequestError(ErrorCode.FAILED, "the device is on fire"))
                double.send_raw(encode_message(refusal))
        if said:
            events.append(event)
    error, failed = events[-2:]
    assert error.type == "error"
    assert error.message == "the device is on fire"
    assert failed.type == "response.failed"
    assert failed.sequence_number == error.sequence_number + 1
    assert failed.response.status == "failed"
    assert failed.response.error is not None
    assert (failed.response.error.code, failed.response.error.message) == ("server_error", "the device is on fire")
    assert failed.response.output_text == said


def test_no_body_breaks_the_server(live: LiveServer) -> None:
    names = [*ResponsesBody.model_fields, *REFUSED, *_REFUSED, "text"]
    with httpx.Client(base_url=live.url) as client:
        for _ in range(400):
            body = {"input": "hi", "max_output_tokens": 3}
            body |= {name: odd_value() for name in random.sample(names, random.randrange(1, 4))}
            response = client.post(PATH, json=body)
            assert response.status_code in (200, 400, 404), (body, response.text)
            assert "internal_error" not in response.text, body
    live.double.wait(lambda: not live.double.running)
