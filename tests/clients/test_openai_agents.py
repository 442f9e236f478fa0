"""OpenAI's Agents SDK: its loop over chat and Responses, with a tool, typed answers and reasoning."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai.types.shared import Reasoning

from tests.clients.questions import MODEL, WEATHER, WEATHER_ANSWER, WEATHER_RESULT, Verdict
from tests.system.server import Server


@function_tool(strict_mode=False)
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return WEATHER_RESULT


@pytest.fixture(params=["chat", "responses"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def agent(server: Server, kind: str, **more: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    made = OpenAIChatCompletionsModel if kind == "chat" else OpenAIResponsesModel
    settings = more.pop("model_settings", ModelSettings(temperature=0, max_tokens=200))
    return Agent(name="weather", model=made(MODEL, openai_client=client), model_settings=settings, **more)


def test_a_loop_with_a_tool(server: Server, kind: str) -> None:
    result = Runner.run_sync(agent(server, kind, tools=[get_weather]), WEATHER, max_turns=3)
    assert WEATHER_ANSWER in result.final_output
    assert [item.type for item in result.new_items] == [
        "tool_call_item",
        "tool_call_output_item",
        "message_output_item",
    ]


def test_a_streamed_loop(server: Server, kind: str) -> None:
    async def loop() -> tuple[Any, int]:
        result = Runner.run_streamed(agent(server, kind, tools=[get_weather]), WEATHER, max_turns=3)
        raw = [event async for event in result.stream_events() if event.type == "raw_response_event"]
        return result.final_output, len(raw)

    answer, events = asyncio.run(loop())
    assert WEATHER_ANSWER in answer
    assert events > 10


def test_a_typed_answer(server: Server, kind: str) -> None:
    result = Runner.run_sync(agent(server, kind, output_type=Verdict), "Judge it.")
    assert isinstance(result.final_output, Verdict)


def test_reasoning_without_a_store(server: Server) -> None:
    settings = ModelSettings(
        temperature=0,
        max_tokens=200,
        store=False,
        reasoning=Reasoning(effort="medium", summary="auto"),
        response_include=["reasoning.encrypted_content"],
    )
    result = Runner.run_sync(agent(server, "responses", tools=[get_weather], model_settings=settings), WEATHER)
    assert WEATHER_ANSWER in result.final_output
    (first, *_) = result.new_items
    assert first.type == "reasoning_item"
    assert "get_weather" in first.raw_item.summary[0].text
