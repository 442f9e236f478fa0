"""The embedded model calls tools and thinks: the real clients against the real server, a whole round trip each."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.system.server import Server

PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: Any = {"name": "get_weather", "description": "Get the weather in a city", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": FUNCTION}
ASKED: Any = {"role": "user", "content": "What is the weather in Paris?"}
RESULT = '{"temperature": 21, "condition": "sunny"}'


@pytest.fixture(scope="module")
def client(embedded: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{embedded.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def messenger(embedded: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=embedded.url, api_key="none", max_retries=0, timeout=60)


def test_a_round_trip_in_a_chat(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "", "messages": [ASKED], "tools": [TOOL], "temperature": 0, "max_tokens": 120}
    whole = client.chat.completions.create(**ask).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    with client.chat.completions.stream(**ask) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls is not None
    (again,) = streamed.message.tool_calls
    assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)
    assert (streamed.finish_reason, streamed.message.content or None) == (whole.finish_reason, whole.message.content)
    history: Any = [ASKED, whole.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    answer = client.chat.completions.create(**ask | {"messages": history}).choices[0]
    assert answer.finish_reason == "stop"
    assert "21" in (answer.message.content or "")


def test_a_round_trip_in_messages(messenger: anthropic.Anthropic) -> None:
    tool: Any = {"name": "get_weather", "description": FUNCTION["description"], "input_schema": PARAMETERS}
    ask: dict[str, Any] = {"model": "", "max_tokens": 120, "tools": [tool], "extra_body": {"temperature": 0}}
    whole = messenger.messages.create(**ask, messages=[ASKED])
    assert whole.stop_reason == "tool_use"
    (block,) = whole.content
    assert block.type == "tool_use"
    assert (block.name, block.input) == ("get_weather", {"city": "Paris"})
    with messenger.messages.stream(**ask, messages=[ASKED]) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert (streamed.name, streamed.input) == (block.name, block.input)
    assert json.loads("".join(pieces)) == block.input
    history: Any = [
        ASKED,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": RESULT}]},
    ]
    answer = messenger.messages.create(**ask, messages=history)
    assert answer.stop_reason == "end_turn"
    assert "21" in "".join(block.text for block in answer.content if block.type == "text")


def test_a_round_trip_in_responses(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "", "tools": [{"type": "function", **FUNCTION}], "temperature": 0}
    whole = client.responses.create(**ask, input=[ASKED])
    (call,) = whole.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    with client.responses.stream(**ask, input=[ASKED]) as stream:
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    answer = client.responses.create(**ask, input=[ASKED, call.model_dump(exclude={"parsed_arguments"}), result])
    assert "21" in answer.output_text


OTHER: Any = {
    "type": "function",
    "function": {
        "name": "set_alarm",
        "parameters": {
            "type": "object",
            "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}, "loud": {"type": "boolean"}},
            "required": ["hour", "loud"],
            "additionalProperties": False,
        },
    },
}


def check_alarm(arguments: str) -> None:
    found = json.loads(arguments)
    assert set(found) == {"hour", "loud"}
    assert type(found["loud"]) is bool
    assert type(found["hour"]) is int
    assert 0 <= found["hour"] <= 23


@pytest.mark.parametrize("thinking", [None, False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_alarm"}}])
def test_a_call_is_forced_whatever_was_said(client: openai.OpenAI, choice: Any, thinking: bool | None) -> None:
    tools = [OTHER] if choice == "required" else [TOOL, OTHER]
    more = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    ask: dict[str, Any] = {
        "model": "", "messages": [{"role": "user", "content": "Hello!"}], "tools": tools, "tool_choice": choice,
        "temperature": 0, "max_tokens": 300, "parallel_tool_calls": False, "extra_body": more,
    }  # fmt: skip
    whole = client.chat.completions.create(**ask).choices[0]
    message: Any = whole.message
    assert whole.finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert (call.function.name, message.content) == ("set_alarm", None)
    check_alarm(call.function.arguments)
    if thinking:
        assert message.reasoning
    chunks: Any = list(client.chat.completions.create(**ask, stream=True))
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments


def test_a_call_is_forced_in_the_other_dialects(client: openai.OpenAI, messenger: anthropic.Anthropic) -> None:
    function = OTHER["function"]
    tool: Any = {"name": function["name"], "input_schema": function["parameters"]}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    message = messenger.messages.create(
        model="", max_tokens=200, messages=[{"role": "user", "content": "Hello!"}], tools=[tool], tool_choice=choice
    )
    assert message.stop_reason == "tool_use"
    (block,) = [block for block in message.content if block.type != "thinking"]
    assert block.type == "tool_use"
    check_alarm(json.dumps(block.input))
    flat: Any = {"type": "function", "strict": True, **function}
    response = client.responses.create(
        model="", input="Hello!", tools=[flat], tool_choice="required", parallel_tool_calls=False
    )
    (item,) = [item for item in response.output if item.type != "reasoning"]
    assert item.type == "function_call"
    check_alarm(item.arguments)


def test_a_strict_tool_has_its_schema_when_the_model_chooses_it(client: openai.OpenAI) -> None:
    strict: Any = {
        "type": "function",
        "function": FUNCTION | {"strict": True, "parameters": PARAMETERS | {"additionalProperties": False}},
    }
    ask: dict[str, Any] = {"model": "", "tools": [strict], "temperature": 0, "max_tokens": 120}
    (call,) = client.chat.completions.create(**ask, messages=[ASKED]).choices[0].message.tool_calls or [None]
    assert call is not None
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    plain = client.chat.completions.create(**ask, messages=[{"role": "user", "content": "Hello!"}]).choices[0]
    assert plain.message.content


def test_a_document_or_a_call(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 3]}}, "required": ["n"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    ask: dict[str, Any] = {
        "model": "", "tools": [TOOL], "response_format": form, "temperature": 0, "max_tokens": 120,
    }  # fmt: skip
    called = client.chat.completions.create(**ask, messages=[ASKED]).choices[0]
    assert called.finish_reason == "tool_calls"
    answered = client.chat.completions.create(
        **ask | {"tools": [TOOL], "tool_choice": "none"}, messages=[{"role": "user", "content": "What is 1 + 2?"}]
    ).choices[0]
    assert json.loads(answered.message.content or "")["n"] in (1, 3)


def test_thinking_is_told_apart_in_every_dialect(client: openai.OpenAI, messenger: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "What is 17 + 25?"}]
    ask: dict[str, Any] = {"model": "", "temperature": 0}
    more: Any = {"chat_template_kwargs": {"enable_thinking": True}}
    whole = client.chat.completions.create(**ask, messages=messages, max_tokens=200, extra_body=more)
    message: Any = whole.choices[0].message
    assert message.reasoning
    assert message.reasoning == message.reasoning_content
    assert "think>" not in message.reasoning + message.content
    chunks: Any = list(
        client.chat.completions.create(**ask, messages=messages, max_tokens=200, extra_body=more, stream=True)
    )
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == message.reasoning
    assert "".join(delta.get("content") or "" for delta in deltas) == message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    count = whole.usage.completion_tokens_details.reasoning_tokens
    assert 2 < (count or 0) < whole.usage.completion_tokens
    plain: dict[str, Any] = {"model": "", "max_tokens": 1025, "messages": messages, "extra_body": {"temperature": 0}}
    thinking = messenger.messages.create(**plain, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [getattr(block, "thinking", getattr(block, "text", "")) for block in thinking.content] == [
        message.reasoning,
        message.content,
    ]
    response = client.responses.create(**ask, input=messages, reasoning={"effort": "low"})
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_text == message.content
    quiet = client.chat.completions.create(**ask, messages=messages, reasoning_effort="none")
    assert not hasattr(quiet.choices[0].message, "reasoning")


@pytest.mark.parametrize("budget", [1, 4])
def test_thinking_ends_with_its_budget(client: openai.OpenAI, budget: int) -> None:
    more = {"chat_template_kwargs": {"enable_thinking": True}, "max_thinking_tokens": budget}
    ask: dict[str, Any] = {"model": "", "temperature": 0, "max_tokens": 200, "extra_body": more}
    messages: Any = [{"role": "user", "content": "What is 17 + 25?"}]
    answers: list[Any] = [client.chat.completions.create(**ask, messages=messages) for _ in range(2)]
    usage = answers[0].usage
    assert budget <= usage.completion_tokens_details.reasoning_tokens <= budget + 3
    assert answers[0].choices[0].message == answers[1].choices[0].message
    assert answers[0].choices[0].message.content
    assert usage == answers[1].usage.model_copy(update={"prompt_tokens_details": usage.prompt_tokens_details})
