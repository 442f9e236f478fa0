"""Anthropic's dialect, with the real client against the real server."""

from __future__ import annotations

import json
import random
from typing import Any

import anthropic
import httpx
import pytest
from pydantic import TypeAdapter

from api_server.dialects.anthropic.requests import REFUSED
from api_server.dialects.anthropic.schema import Message, MessagesBody, StreamEvent
from api_server.text.tokenizer import Tokenizer
from interfaces.result.results import ErrorCode, RequestError
from interfaces.wire.codec import encode as encode_message
from tests.api_server.conftest import CORPUS, LiveServer, encode, leave_when
from tests.api_server.dialects.test_openai import LONG, UNICODE, odd_value, post, says

USER: Any = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "input_schema": {"type": "object"}}


@pytest.fixture
def client(live: LiveServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0)


@pytest.fixture
def async_client(live: LiveServer) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=live.url, api_key="none", max_retries=0)


def asked(**more: Any) -> dict[str, Any]:
    return {"messages": USER, "max_tokens": 50, **more}


def events_of(text: str) -> list[dict[str, Any]]:
    """The frames of a stream, each of which must have its type as its name."""
    frames = text.split("\n\n")
    assert frames.pop() == ""
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def prompt_of(live: LiveServer, tokenizer: Tokenizer) -> str:
    ids = live.double.submits[-1].text.tokens.prompt.tolist()
    return str(tokenizer._backend.decode(ids, skip_special_tokens=False))


def test_message(client: anthropic.Anthropic, live: LiveServer, tokenizer: Tokenizer) -> None:
    message = client.messages.create(model="tiny-chat", max_tokens=50, messages=USER)
    assert [(block.type, getattr(block, "text", None)) for block in message.content] == [("text", "Hello, world!")]
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny-chat")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    prompt = encode(tokenizer, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert live.double.submits[0].text.tokens.prompt.tolist() == prompt
    assert message.usage.input_tokens == len(prompt)
    assert message.usage.output_tokens == len(encode(tokenizer, "Hello, world!")) + 1
    assert message._request_id
    assert message.id != client.messages.create(model="tiny-chat", max_tokens=5, messages=USER).id


@pytest.mark.parametrize("text", [UNICODE, random.choice(CORPUS)[: random.randrange(1, 40)]])
async def test_streamed_message_is_the_message(
    async_client: anthropic.AsyncAnthropic, live: LiveServer, tokenizer: Tokenizer, text: str
) -> None:
    says(live.double, tokenizer, text)
    live.double.cached = random.randrange(1, 9)
    whole = await async_client.messages.create(model="", max_tokens=200, messages=USER)
    async with async_client.messages.stream(model="", max_tokens=200, messages=USER) as stream:
        pieces = [piece async for piece in stream.text_stream]
        streamed = await stream.get_final_message()
    assert "".join(pieces) == text
    assert len(pieces) > 1 or len(text) == 1
    assert streamed.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})


def test_events_are_exact(live: LiveServer, client: anthropic.Anthropic) -> None:
    response = post(live, "/v1/messages", asked(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["request-id"] == response.headers["x-request-id"]
    events = events_of(response.text)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    assert start["usage"]["input_tokens"] == events[-2]["usage"]["input_tokens"] > 0
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    for event in events:
        assert StreamEvent.model_validate(event).model_dump(exclude_unset=True) == event
    sent = [event.type for event in client.messages.create(model="", max_tokens=50, messages=USER, stream=True)]
    # On a busy machine tokens come together: how many deltas there are is no fact of the answer.
    assert list(dict.fromkeys(sent)) == list(dict.fromkeys(kind for kind in kinds if kind != "ping"))
    whole = post(live, "/v1/messages", asked()).json()
    assert TypeAdapter(Message).validate_python(whole).model_dump(exclude_unset=True) == whole


@pytest.mark.parametrize("stream", [False, True])
def test_reasons(live: LiveServer, tokenizer: Tokenizer, stream: bool) -> None:
    live.double.answer = lambda _: encode(tokenizer, "x")

    def ending(**more: Any) -> tuple[Any, Any, int]:
        response = post(live, "/v1/messages", asked(stream=stream, **more))
        found = events_of(response.text)[-2] if stream else response.json()
        delta = found["delta"] if stream else found
        return delta["stop_reason"], delta["stop_sequence"], found["usage"]["output_tokens"]

    assert ending(max_tokens=5) == ("max_tokens", None, 5)
    reason, sequence, count = ending(max_tokens=10**6)
    assert (reason, sequence) == ("model_context_window_exceeded", None)
    assert count == 256 - len(live.double.submits[-1].text.tokens.prompt)
    assert ending(stop_sequences=["y", "xxx"]) == ("stop_sequence", "xxx", 3)


def test_values_reach_the_scheduler(client: anthropic.Anthropic, live: LiveServer) -> None:
    client.messages.create(
        model="", max_tokens=9, messages=USER, stop_sequences=["zz"], metadata={"user_id": "u"},
        extra_body={"temperature": 0.3, "top_p": 0.8, "top_k": 7},
    )  # fmt: skip
    got = live.double.submits[0].text.sampling_params
    assert (got.temperature, got.top_p, got.top_k, got.stop, got.max_new_tokens) == (0.3, 0.8, 7, ["zz"], 9)
    post(live, "/v1/messages", asked())
    assert live.double.submits[1].text.sampling_params.top_k == 20  # generation_config.json


def test_prompts(live: LiveServer, tokenizer: Tokenizer) -> None:
    def prompt(**more: Any) -> str:
        response = post(live, "/v1/messages", asked(**more))
        assert response.status_code == 200, response.text
        return prompt_of(live, tokenizer)

    start, end = "<|im_start|>", "<|im_end|>\n"
    opened = f"{start}assistant\n"
    user = f"{start}user\nhi{end}"
    assert prompt(system="be brief") == f"{start}system\nbe brief{end}{user}{opened}"
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    assert prompt(system=blocks) == f"{start}system\na\nb{end}{user}{opened}"
    assert prompt(messages=[{"role": "user", "content": blocks}]) == f"{start}user\na\nb{end}{opened}"
    assert prompt(messages=[*USER, {"role": "user", "content": "there"}]) == f"{start}user\nhi\nthere{end}{opened}"
    assert prompt(messages=[*USER, {"role": "assistant", "content": "It is"}]) == f"{user}{opened}It is"
    assert prompt(messages=[*USER, {"role": "assistant", "content": ""}]) == f"{user}{opened}"
    assert prompt(thinking={"type": "disabled"}) == f"{user}{opened}"


@pytest.mark.parametrize("cached", [0, 5])
def test_counted_tokens_are_the_tokens_used(client: anthropic.Anthropic, live: LiveServer, cached: int) -> None:
    live.double.cached = cached
    messages: Any = [{"role": "user", "content": random.choice(CORPUS)[: random.randrange(1, 60)]}]
    system: Any = [{"type": "text", "text": "be brief"}]
    count = client.messages.count_tokens(model="tiny-chat", messages=messages, system=system)
    usage = client.messages.create(model="", max_tokens=5, messages=messages, system=system).usage
    assert usage.cache_read_input_tokens == cached
    assert count.input_tokens == usage.input_tokens + cached
    assert len(live.double.submits) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": USER}, "max_tokens"),
        (asked(max_tokens=0), "max_tokens"),
        (asked(max_tokens="5"), "max_tokens"),
        ({"max_tokens": 5}, "messages"),
        (asked(messages=[]), "messages"),
        (asked(messages="hi"), "messages"),
        (asked(messages=["hi"]), "messages[0]"),
        (asked(messages=[{"role": "king", "content": "x"}]), "messages[0].role"),
        (asked(messages=[{"role": "user"}]), "messages[0].content"),
        (asked(messages=[{"role": "user", "content": ""}]), "messages[0].content"),
        (asked(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
        (asked(messages=[{"role": "user", "content": [{"type": "text", "text": ""}]}]), "messages[0].content"),
        (asked(messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]), "messages[0].content[0]"),
        (asked(messages=[{"role": "assistant", "content": [{"type": "tool_use"}]}]), "messages[0].content[0]"),
        (asked(messages=[*USER, {"role": "assistant", "content": "It is "}]), "messages[1].content"),
        (asked(messages=[{"role": "assistant", "content": ""}]), "messages"),
        (asked(system=5), "system"),
        (asked(system=[{"type": "image"}]), "system[0]"),
        (asked(temperature=1.5), "temperature"),
        (asked(top_p=2), "top_p"),
        (asked(top_k=-1), "top_k"),
        (asked(stop_sequences=[""]), "stop_sequences[0]"),
        (asked(stop_sequences="x"), "stop_sequences"),
        (asked(metadata={"user_id": 5}), "metadata.user_id"),
        (asked(tools=[{"type": "telepathy"}]), "tools[0].type"),
        (asked(tools=[{"type": "web_search_20250305", "name": "web_search"}]), "tools[0].type"),
        (asked(tools=[TOOL | {"allowed_callers": ["code_execution_20250825"]}]), "tools[0].allowed_callers"),
        (asked(output_config={"task_budget": {"type": "tokens", "total": 9}}), "output_config.task_budget"),
        (asked(context_management={"edits": [{"type": "forget_everything"}]}), "context_management.edits[0]"),
        (asked(tools=[TOOL, TOOL]), "tools"),
        (asked(tools=[TOOL], tool_choice={"type": "tool", "name": "g"}), "tool_choice"),
        (asked(tool_choice={"type": "any"}), "tool_choice"),
        (asked(thinking={"type": "enabled", "budget_tokens": 0}), "thinking"),
        (asked(thinking={"type": "sometimes"}), "thinking"),
        (asked(mcp_servers=[{"url": "x"}]), "mcp_servers"),
        (asked(output_config={"format": {"type": "json_schema"}}), "output_config.format"),
        (asked(output_config={"format": {"type": "yaml"}}), "output_config.format"),
        (asked(output_format={"type": "json_schema", "schema": 5}), "output_format"),
        (asked(output_config={"format": {"type": "text"}}, output_format={"type": "text"}), "output_format"),
    ],
)  # fmt: skip
def test_bad_bodies_are_400_and_name_the_field(live: LiveServer, body: Any, field: str) -> None:
    for stream in (False, True):
        response = post(live, "/v1/messages", body | {"stream": stream})
        assert response.status_code == 400, response.text
        answer = response.json()
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
        assert answer["request_id"] == response.headers["request-id"]
        assert field in answer["error"]["message"]
    assert not live.double.submits


def test_values_that_ask_for_nothing_are_accepted(live: LiveServer) -> None:
    nothing: dict[str, Any] = {
        "tools": [], "tool_choice": {"type": "auto"}, "thinking": None, "metadata": None, "system": "", "stream": None,
        "cache_control": {"type": "ephemeral"}, "service_tier": "auto", "stop_sequences": [], "top_k": 0,
        "container": None, "unheard_of": 1, "context_management": None,
    }  # fmt: skip
    assert post(live, "/v1/messages", asked(**nothing)).status_code == 200


def test_errors_are_the_clients_own(client: anthropic.Anthropic, live: LiveServer) -> None:
    with pytest.raises(anthropic.NotFoundError, match="tiny-chat") as missing:
        client.messages.create(model="some-other", max_tokens=5, messages=USER)
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 255 maximum"):
        client.messages.create(model="", max_tokens=5, messages=[{"role": "user", "content": LONG}])
    assert client.messages.count_tokens(model="", messages=[{"role": "user", "content": LONG}]).input_tokens > 256
    for method, status in (("POST", 400), ("GET", 405)):
        response = httpx.request(method, live.url + "/v1/messages", content=b"{nonsense")
        assert (response.status_code, response.json()["error"]["type"]) == (status, "invalid_request_error")


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (ErrorCode.OVERLOADED, 429, "rate_limit_error"),
        (ErrorCode.UNAVAILABLE, 529, "overloaded_error"),
        (ErrorCode.TOO_LONG, 400, "invalid_request_error"),
        (ErrorCode.FAILED, 500, "api_error"),
    ],
)
def test_refusals_of_the_scheduler(
    client: anthropic.Anthropic, live: LiveServer, code: str, status: int, kind: str
) -> None:
    live.double.refuse = RequestError(code, "because of this")
    for stream in (False, True):
        with pytest.raises(anthropic.APIStatusError, match="because of this") as caught:
            client.messages.create(model="", max_tokens=5, messages=USER, stream=stream)
        assert (caught.value.status_code, caught.value.type) == (status, kind)
        assert ("retry-after" in caught.value.response.headers) == (status in (429, 529))


async def test_a_failure_after_the_first_byte_is_an_event(
    live: LiveServer, async_client: anthropic.AsyncAnthropic
) -> None:
    double = live.double
    double.answer = lambda _: [40]
    stream = await async_client.messages.create(model="", messages=USER, stream=True, max_tokens=200)
    double.hold.set()
    async for event in stream:
        if event.type == "content_block_delta":
            break
    refusal = double._refusal(double.submits[0], RequestError(ErrorCode.FAILED, "the device is on fire"))
    double.send_raw(encode_message(refusal))
    with pytest.raises(anthropic.APIStatusError, match="on fire") as caught:
        async for _ in stream:
            pass
    assert caught.value.type == "api_error"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels(live: LiveServer, tokenizer: Tokenizer, path: str, stream: bool) -> None:
    live.double.answer = lambda _: encode(tokenizer, "x")
    live.double.step_seconds = 0.02
    body = asked(max_tokens=200) if path == "/v1/messages" else {"input": "hi"}
    if stream:
        with httpx.stream("POST", live.url + path, json=body | {"stream": True}, timeout=90) as response:
            next(response.iter_raw())
    else:
        leave_when(lambda: live.double.running, live, path, body)
    live.double.wait(lambda: live.double.cancelled == [live.double.submits[0].handle])
    live.double.wait(lambda: not live.double.running)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_no_body_breaks_the_server(live: LiveServer, path: str) -> None:
    names = [*MessagesBody.model_fields, *REFUSED]
    with httpx.Client(base_url=live.url) as client:
        for _ in range(300):
            body = asked(max_tokens=3) | {name: odd_value() for name in random.sample(names, random.randrange(1, 4))}
            response = client.post(path, json=body)
            assert response.status_code in (200, 400, 404), (body, response.text)
        for content in (
            b"",
            b"[]",
            b"\xff\xfe",
            b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
            b"[" * 9999,
        ):
            assert client.post(path, content=content).status_code == 400
    live.double.wait(lambda: not live.double.running)


def test_the_model_is_listed_in_anthropics_form(client: anthropic.Anthropic, live: LiveServer) -> None:
    page = client.models.list()
    (listed,) = page.data
    shown = client.models.retrieve("tiny-chat")
    assert listed == shown
    assert (listed.id, listed.type, listed.display_name) == ("tiny-chat", "model", "tiny-chat")
    assert abs(listed.created_at.timestamp() - live.state.created) < 1
    assert (listed.max_input_tokens, page.has_more, page.first_id, page.last_id) == (
        256,
        False,
        "tiny-chat",
        "tiny-chat",
    )
    assert len(list(client.models.list(limit=1))) == 1
    assert client.models.list(after_id="tiny-chat").data == []
    with pytest.raises(anthropic.NotFoundError, match="no-such") as missing:
        client.models.retrieve("no-such")
    assert missing.value.type == "not_found_error"
    openais = httpx.get(live.url + "/v1/models").json()
    assert (openais["object"], openais["data"][0]["object"]) == ("list", "model")


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages/x/y"])
def test_unknown_pages_below_messages_are_anthropics(live: LiveServer, path: str) -> None:
    answer = httpx.get(live.url + path)
    assert (answer.status_code, answer.json()["type"]) == (404, "error")
    assert answer.json()["error"]["type"] == "not_found_error"
    assert "error" in httpx.get(live.url + "/v1/nothing").json()
    assert "type" not in httpx.get(live.url + "/v1/nothing").json()
