"""pydantic-ai's agents over chat and Responses: text, typed answers by tool and by schema, thinking.

Its AnthropicModel raises a TypeError of its own with the anthropic releases of today, before it sends anything.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic_ai import Agent, NativeOutput, ThinkingPart, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.questions import (
    MODEL,
    PERSON,
    SUM,
    SUM_ANSWER,
    WEATHER,
    WEATHER_ANSWER,
    WEATHER_RESULT,
    Person,
    Verdict,
)
from tests.system.server import Server

THINKING: dict[str, dict[str, Any]] = {
    "chat": {"openai_reasoning_effort": "medium"},
    "responses": {"openai_reasoning_effort": "medium", "openai_reasoning_summary": "auto"},
}


@pytest.fixture(params=["chat", "responses"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def agent(server: Server, kind: str, settings: dict[str, Any] | None = None, **more: Any) -> Any:
    made = OpenAIChatModel if kind == "chat" else OpenAIResponsesModel
    model: Any = made(MODEL, provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key="none"))
    common = {"max_tokens": 200, "temperature": 0}
    return Agent(model, model_settings={**common, **(settings or {})}, retries=0, **more)


def test_text_and_its_stream(server: Server, kind: str) -> None:
    asked = agent(server, kind)
    assert asked.run_sync(SUM).output == SUM_ANSWER

    async def streamed() -> str:
        async with asked.run_stream(SUM) as result:
            return str([text async for text in result.stream_text()][-1])

    assert asyncio.run(streamed()) == SUM_ANSWER


def test_a_tool_loop(server: Server, kind: str) -> None:
    cities = []
    asked = agent(server, kind)

    @asked.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather in a city"""
        cities.append(city)
        return WEATHER_RESULT

    assert WEATHER_ANSWER in asked.run_sync(WEATHER).output
    assert cities == ["Paris"]


@pytest.mark.parametrize("by", ["tool", "schema"])
def test_a_typed_answer(server: Server, kind: str, by: str) -> None:
    wanted: Any = ToolOutput(Person) if by == "tool" else NativeOutput(Verdict)
    asked = agent(server, kind, output_type=wanted)
    assert isinstance(asked.run_sync(PERSON).output, Person if by == "tool" else Verdict)


def test_thinking_can_be_seen_and_goes_round(server: Server, kind: str) -> None:
    asked = agent(server, kind, THINKING[kind])

    @asked.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather in a city"""
        return WEATHER_RESULT

    result = asked.run_sync(WEATHER)
    assert WEATHER_ANSWER in result.output
    thoughts = [part for m in result.all_messages() for part in m.parts if isinstance(part, ThinkingPart)]
    assert "get_weather" in thoughts[0].content
