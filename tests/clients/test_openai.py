"""OpenAI's SDK: chat, completions and Responses with its helpers for types, tools and streams."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.clients.questions import (
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

TOOL: Any = {"type": "function", "function": FUNCTION}
FLAT_TOOL: Any = {"type": "function", "strict": False, **FUNCTION}
ASKED: Any = {"role": "user", "content": WEATHER}


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 150,
        **more,
    }


def test_an_answer_and_its_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**chat(SUM))
    assert whole.choices[0].message.content == SUM_ANSWER
    chunks = list(client.chat.completions.create(**chat(SUM), stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SUM_ANSWER
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**chat(SUM, logprobs=True, top_logprobs=2, max_tokens=5))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    for token in logprobs.content:
        assert token.token == token.top_logprobs[0].token
        assert token.logprob == token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob


def test_a_parsed_answer_and_its_stream(client: openai.OpenAI) -> None:
    person = client.chat.completions.parse(**chat(PERSON), response_format=Person).choices[0].message.parsed
    assert isinstance(person, Person)
    with client.chat.completions.stream(**chat(PERSON), response_format=Verdict) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "content.delta")
        message = stream.get_final_completion().choices[0].message
    assert message.parsed == Verdict.model_validate_json(deltas)


def test_a_tool_loop(client: openai.OpenAI) -> None:
    called = client.chat.completions.create(**chat(WEATHER, tools=[TOOL])).choices[0]
    assert called.finish_reason == "tool_calls"
    assert called.message.tool_calls is not None
    (call,) = called.message.tool_calls
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    history: Any = [ASKED, called.message, {"role": "tool", "tool_call_id": call.id, "content": WEATHER_RESULT}]
    answer = client.chat.completions.create(**chat("") | {"messages": history}, tools=[TOOL]).choices[0]
    assert answer.finish_reason == "stop"
    assert WEATHER_ANSWER in (answer.message.content or "")


def test_a_typed_tool_in_a_stream(client: openai.OpenAI) -> None:
    """`pydantic_function_tool` makes strict tools, and the helper parses their arguments."""
    tool = openai.pydantic_function_tool(Verdict, name="judge")
    with client.chat.completions.stream(**chat("Judge it."), tools=[tool], tool_choice="required") as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert calls is not None
    assert len(done) == len(calls)
    assert all(isinstance(call.function.parsed_arguments, Verdict) for call in calls)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_named_function_is_called_once(client: openai.OpenAI, streamed: bool) -> None:
    ask = chat("Hello!", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "get_weather"}})
    if streamed:
        with client.chat.completions.stream(**ask) as stream:
            choice: Any = stream.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**ask).choices[0]
    assert choice.finish_reason in ("stop", "tool_calls")
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"city"}


def test_a_streamed_completion(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**ask)
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage


def test_a_raw_response_has_the_request_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**chat(SUM), extra_headers={"X-Request-Id": "mine-7"})
    assert raw.headers["x-request-id"] == "mine-7"
    assert raw.parse().choices[0].message.content == SUM_ANSWER


def test_a_response_and_its_stream(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "input": SUM, "temperature": 0}
    assert client.responses.create(**ask).output_text == SUM_ANSWER
    with client.responses.stream(**ask) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert (deltas, final.output_text, final.status) == (SUM_ANSWER, SUM_ANSWER, "completed")


def test_a_parsed_response(client: openai.OpenAI) -> None:
    response = client.responses.parse(model=MODEL, input=PERSON, text_format=Person, temperature=0)
    assert isinstance(response.output_parsed, Person)


def test_a_tool_loop_of_responses(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "tools": [FLAT_TOOL], "temperature": 0}
    (call,) = client.responses.create(**ask, input=[ASKED]).output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Paris"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER_RESULT}
    assert WEATHER_ANSWER in client.responses.create(**ask, input=[ASKED, call, result]).output_text


def test_reasoning_goes_round_without_a_store(client: openai.OpenAI) -> None:
    """With `store: false` clients ask for encrypted reasoning, show its summary, and send the whole item back."""
    ask: dict[str, Any] = {"model": MODEL, "tools": [FLAT_TOOL], "temperature": 0, "store": False}
    ask |= {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "medium", "summary": "auto"}}
    with client.responses.stream(**ask, input=[ASKED]) as stream:
        summary = "".join(event.delta for event in stream if event.type == "response.reasoning_summary_text.delta")
        thought, call = stream.get_final_response().output
    assert thought.type == "reasoning"
    assert call.type == "function_call"
    assert summary == "".join(part.text for part in thought.summary)
    assert "get_weather" in summary
    assert thought.encrypted_content
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER_RESULT}
    history: Any = [ASKED, thought.model_dump(exclude={"content", "status"}), call, result]
    assert WEATHER_ANSWER in client.responses.create(**ask, input=history).output_text


def test_the_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
