"""LiteLLM: its providers for this server's dialects, and its adapter from Messages (a proxy for Claude Code)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
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
    Verdict,
)
from tests.system.server import Server

TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
PROVIDERS = {"openai": "/v1", "hosted_vllm": "/v1", "lm_studio": "/v1", "anthropic": "", "huggingface": "/v1"}


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest, server: Server) -> dict[str, Any]:
    base = server.url + PROVIDERS[request.param]
    if request.param == "huggingface":
        base += "/chat/completions"
    return {"model": f"{request.param}/{MODEL}", "api_base": base, "api_key": "none", "timeout": 60, "max_tokens": 200}


def asked(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_an_answer_and_its_stream(provider: dict[str, Any]) -> None:
    answer = litellm.completion(**provider, messages=asked(SUM), temperature=0)
    assert answer.choices[0].message.content == SUM_ANSWER
    chunks = litellm.completion(**provider, messages=asked(SUM), temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SUM_ANSWER


def test_a_tool_loop(provider: dict[str, Any]) -> None:
    ask: dict[str, Any] = provider | {"tools": [TOOL], "temperature": 0}
    message = litellm.completion(**ask, messages=asked(WEATHER)).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": WEATHER_RESULT}
    answer = litellm.completion(**ask, messages=[*asked(WEATHER), message, result])
    assert WEATHER_ANSWER in answer.choices[0].message.content


@pytest.mark.parametrize("name", ["openai", "hosted_vllm", "anthropic"])
def test_a_typed_answer(server: Server, name: str) -> None:
    ask: dict[str, Any] = {"model": f"{name}/{MODEL}", "api_base": server.url + PROVIDERS[name], "api_key": "none"}
    answer = litellm.completion(**ask, messages=asked(PERSON), response_format=Person, temperature=0, max_tokens=200)
    assert Person.model_validate_json(answer.choices[0].message.content)


def test_a_completion(server: Server) -> None:
    ask = {"model": f"text-completion-openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none"}
    answer = litellm.text_completion(**ask, prompt="Once upon a time", max_tokens=8, temperature=0)
    assert answer.usage.completion_tokens == 8


def test_responses(server: Server) -> None:
    ask: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none"}
    answer = litellm.responses(**ask, input=SUM, temperature=0)
    assert answer.output[-1].content[0].text == SUM_ANSWER
    typed = litellm.responses(**ask, input="Judge it.", text_format=Verdict, temperature=0)
    assert Verdict.model_validate_json(typed.output[-1].content[0].text)


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_messages_through_the_adapter(server: Server, name: str) -> None:
    """What a LiteLLM proxy does for Claude Code: Messages in, another dialect out."""
    tool = {"name": "get_weather", "description": FUNCTION["description"], "input_schema": CITY_SCHEMA}
    ask: dict[str, Any] = {"model": f"{name}/{MODEL}", "api_base": server.url + PROVIDERS[name], "api_key": "none"}
    ask |= {"max_tokens": 200, "tools": [tool], "temperature": 0}
    thinking = {"type": "enabled", "budget_tokens": 1024}

    async def loop() -> tuple[Any, Any]:
        first = await litellm.anthropic.messages.acreate(**ask, messages=asked(WEATHER), thinking=thinking)
        use = first["content"][-1]
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": WEATHER_RESULT}
        turns = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        return use, await litellm.anthropic.messages.acreate(**ask, messages=[*asked(WEATHER), *turns])

    use, answer = asyncio.run(loop())
    assert (use["type"], use["input"]) == ("tool_use", {"city": "Paris"})
    assert WEATHER_ANSWER in "".join(block.get("text", "") for block in answer["content"])
