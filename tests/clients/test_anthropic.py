"""Anthropic's SDK: messages, streams, tools with its runner, thinking, counting, context management."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from tests.clients.questions import (
    CITY_SCHEMA,
    FUNCTION,
    MODEL,
    PERSON,
    SUM,
    SUM_ANSWER,
    WEATHER,
    WEATHER_ANSWER,
    WEATHER_RESULT,
    Person,
)
from tests.system.server import Server

TOOL: Any = {"name": "get_weather", "description": FUNCTION["description"], "input_schema": CITY_SCHEMA}
ASKED: Any = {"role": "user", "content": WEATHER}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def ask(text: str, **more: Any) -> dict[str, Any]:
    question: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": text}]}
    return {**question, "extra_body": {"temperature": 0}, **more}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_an_answer_and_its_stream(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ask(SUM))
    assert (text_of(message), message.stop_reason) == (SUM_ANSWER, "end_turn")
    with client.messages.stream(**ask(SUM)) as stream:
        assert "".join(stream.text_stream) == SUM_ANSWER
        final = stream.get_final_message()
    assert final.usage.output_tokens == message.usage.output_tokens


def test_fields_that_have_no_value_are_left_out(client: anthropic.Anthropic) -> None:
    """Clients with a strict schema refuse `citations: null`, which the reference server never sends."""
    (block,) = client.messages.create(**ask(SUM)).content
    assert block.model_fields_set == {"type", "text"}


@pytest.mark.parametrize("eager", [False, True])
def test_tools_in_a_stream(client: anthropic.Anthropic, eager: bool) -> None:
    tool = TOOL | {"eager_input_streaming": eager}
    with client.messages.stream(**ask(WEATHER, tools=[tool])) as stream:
        pieces = "".join(event.partial_json for event in stream if event.type == "input_json")
        message = stream.get_final_message()
    (block,) = message.content
    assert block.type == "tool_use"
    assert (message.stop_reason, block.input) == ("tool_use", {"city": "Paris"})
    assert json.loads(pieces) == block.input


def test_a_named_tool_is_used_once(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ask("Hello!", tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"}))
    (block,) = (block for block in message.content if block.type != "thinking")
    assert block.type == "tool_use"
    assert message.stop_reason == "tool_use"
    assert isinstance(block.input, dict)
    assert block.input.keys() == {"city"}


def test_the_tool_runner_goes_to_the_end(client: anthropic.Anthropic) -> None:
    cities = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the weather in a city"""
        cities.append(city)
        return WEATHER_RESULT

    runner = client.beta.messages.tool_runner(**ask(WEATHER), tools=[get_weather])
    assert WEATHER_ANSWER in text_of(runner.until_done())
    assert cities == ["Paris"]


def test_thinking_goes_into_the_second_turn(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**ask(WEATHER, tools=[TOOL], thinking=THINKING)) as stream:
        thought = "".join(event.thinking for event in stream if event.type == "thinking")
        first = stream.get_final_message()
    assert [block.type for block in first.content] == ["thinking", "tool_use"]
    assert "get_weather" in thought
    use: Any = first.content[1]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": WEATHER_RESULT}
    turns: Any = [ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**ask("") | {"messages": turns}, tools=[TOOL], thinking=THINKING)
    assert WEATHER_ANSWER in text_of(second)


def test_the_count_is_what_the_answer_is_charged(client: anthropic.Anthropic) -> None:
    messages: Any = [ASKED]
    counted = client.messages.count_tokens(model=MODEL, messages=messages, tools=[TOOL]).input_tokens
    usage = client.messages.create(**ask(WEATHER, tools=[TOOL])).usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted


@pytest.mark.parametrize(
    "edits",
    [
        [],
        [{"type": "clear_thinking_20251015", "keep": "all"}],
        [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 100_000}}],
    ],
    ids=["none", "keep all", "far trigger"],
)
def test_context_management_that_changes_nothing(client: anthropic.Anthropic, edits: Any) -> None:
    more: dict[str, Any] = {"betas": ["context-management-2025-06-27"], "context_management": {"edits": edits}}
    message = client.beta.messages.create(**ask(SUM), **more)
    assert text_of(message) == SUM_ANSWER
    assert message.context_management is None or message.context_management.applied_edits == []


def test_old_tool_results_are_cleared(client: anthropic.Anthropic) -> None:
    turns: Any = [ASKED]
    for number in range(3):
        use: Any = {"type": "tool_use", "id": f"toolu_{number}", "name": "get_weather", "input": {"city": "Paris"}}
        result: Any = {"type": "tool_result", "tool_use_id": use["id"], "content": "cloudy with rain, " * 12}
        turns += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 100},
        "keep": {"type": "tool_uses", "value": 1},
    }
    plain = ask("", messages=turns, tools=[TOOL], max_tokens=8)
    before = client.beta.messages.create(**plain)
    edited: dict[str, Any] = {
        "betas": ["context-management-2025-06-27"],
        "context_management": {"edits": [edit]},
    }
    after = client.beta.messages.create(**plain, **edited)
    assert after.context_management is not None
    (applied,) = after.context_management.applied_edits
    assert applied.type == "clear_tool_uses_20250919"
    assert applied.cleared_tool_uses == 2

    def prompt(usage: Any) -> int:
        return int(usage.input_tokens + (usage.cache_read_input_tokens or 0))

    assert prompt(before.usage) - prompt(after.usage) == applied.cleared_input_tokens > 50


def test_a_parsed_answer(client: anthropic.Anthropic) -> None:
    message = client.messages.parse(**ask(PERSON), output_format=Person)
    assert isinstance(message.parsed_output, Person)


def test_the_models_have_names(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert model.type == "model"
    assert model.id == MODEL
    assert model.display_name
    assert model.created_at.year >= 2000


def test_an_unknown_model_is_an_error_of_this_dialect(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.messages.create(**ask(SUM) | {"model": "claude-none"})
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "not_found_error"
