"""LangChain over chat, Responses and Messages: typed answers by each method, tools, streams with their usage."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

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


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return WEATHER_RESULT


def chat(server: Server, **more: Any) -> Any:
    common: dict[str, Any] = {"model": MODEL, "api_key": "none", "max_retries": 0, "timeout": 60, "temperature": 0}
    return ChatOpenAI(base_url=f"{server.url}/v1", **common, **more)


def messages(server: Server, **more: Any) -> Any:
    common: dict[str, Any] = {"model": MODEL, "api_key": "none", "max_retries": 0, "timeout": 60, "max_tokens": 200}
    return ChatAnthropic(base_url=server.url, model_kwargs={"extra_body": {"temperature": 0}}, **common, **more)


def text_of(message: Any) -> str:
    return str(message.text)


@pytest.fixture(params=["chat", "responses", "messages"])
def model(request: pytest.FixtureRequest, server: Server) -> Any:
    if request.param == "messages":
        return messages(server)
    return chat(server, use_responses_api=request.param == "responses", stream_usage=True)


def test_an_answer_and_its_stream(model: Any) -> None:
    whole = model.invoke(SUM)
    assert text_of(whole) == SUM_ANSWER
    streamed: Any = None
    for chunk in model.stream(SUM):
        streamed = chunk if streamed is None else streamed + chunk
    assert text_of(streamed) == SUM_ANSWER
    assert streamed.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"] > 0


def test_a_tool_loop(model: Any) -> None:
    bound = model.bind_tools([get_weather])
    called = bound.invoke(WEATHER)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    history = [HumanMessage(WEATHER), called, get_weather.invoke(call)]
    assert isinstance(history[-1], ToolMessage)
    assert WEATHER_ANSWER in text_of(bound.invoke(history))


def test_a_streamed_call_adds_up(model: Any) -> None:
    streamed: Any = None
    for chunk in model.bind_tools([get_weather], tool_choice="any").stream(WEATHER):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls
    assert streamed.tool_calls[0]["args"] == {"city": "Paris"}
    assert not streamed.invalid_tool_calls


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_a_typed_answer(model: Any, method: str) -> None:
    answer = model.with_structured_output(Verdict, method=method).invoke("Judge it.")
    assert isinstance(answer, Verdict)


def test_a_typed_answer_in_json_mode(server: Server) -> None:
    answer = chat(server).with_structured_output(Person, method="json_mode").invoke(PERSON)
    assert isinstance(answer, Person)


def test_a_strict_tool(server: Server) -> None:
    answer = chat(server).bind_tools([Verdict], strict=True, tool_choice="Verdict").invoke("Judge it.")
    (call,) = answer.tool_calls
    assert Verdict.model_validate(call["args"])


def test_log_probabilities(server: Server) -> None:
    answer = chat(server).bind(logprobs=True, max_tokens=4).invoke(SUM)
    assert len(answer.response_metadata["logprobs"]["content"]) == 4


def test_reasoning_of_responses_goes_round(server: Server) -> None:
    thinking: Any = {"effort": "medium", "summary": "auto"}
    more: dict[str, Any] = {"use_responses_api": True, "reasoning": thinking, "store": False}
    model = chat(server, include=["reasoning.encrypted_content"], **more).bind_tools([get_weather])
    called = model.invoke(WEATHER)
    kinds = [block["type"] for block in called.content_blocks]
    assert kinds == ["reasoning", "tool_call"]
    assert "get_weather" in called.content_blocks[0]["reasoning"]
    second = model.invoke([HumanMessage(WEATHER), called, get_weather.invoke(called.tool_calls[0])])
    assert WEATHER_ANSWER in text_of(second)


def test_thinking_of_messages_goes_round(server: Server) -> None:
    model = messages(server, thinking={"type": "enabled", "budget_tokens": 1024}).bind_tools([get_weather])
    called = model.invoke(WEATHER)
    assert isinstance(called, AIMessage)
    assert [block["type"] for block in called.content if isinstance(block, dict)] == ["thinking", "tool_use"]
    second = model.invoke([HumanMessage(WEATHER), called, get_weather.invoke(called.tool_calls[0])])
    assert WEATHER_ANSWER in text_of(second)
