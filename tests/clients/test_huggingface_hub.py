"""huggingface_hub's InferenceClient: TGI's text generation, and chat with its own form of response_format."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from huggingface_hub import InferenceClient

from tests.clients.questions import CITY_SCHEMA, PERSON, SUM, SUM_ANSWER, WEATHER, Person, Verdict
from tests.system.server import Server


@pytest.fixture(scope="module")
def client(server: Server) -> InferenceClient:
    return InferenceClient(base_url=server.url, timeout=60)


def test_details_and_their_stream(client: InferenceClient) -> None:
    ask: Any = {"details": True, "max_new_tokens": 10, "return_full_text": False}
    answer = client.text_generation("Once upon a time", **ask)
    assert answer.details is not None
    assert (answer.details.generated_tokens, answer.details.finish_reason) == (10, "length")
    pieces = list(client.text_generation("Once upon a time", **ask, stream=True))
    assert "".join(piece.token.text for piece in pieces) == answer.generated_text == pieces[-1].generated_text


def test_a_grammar(client: InferenceClient) -> None:
    schema: Any = {"type": "json", "value": Person.model_json_schema()}
    assert Person.model_validate_json(client.text_generation(PERSON, grammar=schema, return_full_text=False))
    pattern: Any = {"type": "regex", "value": "[0-9]{3}-[a-f]{2}"}
    assert re.fullmatch(
        "[0-9]{3}-[a-f]{2}", client.text_generation("Serial number:", grammar=pattern, return_full_text=False)
    )


def test_a_chat_and_its_stream(client: InferenceClient) -> None:
    messages = [{"role": "user", "content": SUM}]
    answer = client.chat_completion(messages, max_tokens=40, temperature=0)
    assert answer.choices[0].message.content == SUM_ANSWER
    chunks = client.chat_completion(messages, max_tokens=40, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SUM_ANSWER


def test_a_tool(client: InferenceClient) -> None:
    function = {"name": "get_weather", "description": "Get the weather in a city", "parameters": CITY_SCHEMA}
    tool: Any = {"type": "function", "function": function}
    answer = client.chat_completion(
        [{"role": "user", "content": WEATHER}],
        tools=[tool],
        max_tokens=100,
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_a_response_format(client: InferenceClient) -> None:
    """This client sends the schema as `value`, whatever its caller wrote."""
    named = {"name": "verdict", "schema": Verdict.model_json_schema(), "strict": True}
    wanted: Any = {"type": "json_schema", "json_schema": named}
    answer = client.chat_completion(
        [{"role": "user", "content": "Hello!"}],
        response_format=wanted,
        max_tokens=200,
        temperature=0,
    )
    assert Verdict.model_validate_json(answer.choices[0].message.content or "")


def test_line_separators_of_unicode_do_not_cut_a_stream(client: InferenceClient) -> None:
    """httpx cuts lines where `str.splitlines` does, so these may stand in no frame."""
    text = "a\u2028b\u2029c\x85d"
    grammar: Any = {"type": "json", "value": {"const": text}}
    pieces = client.text_generation("Say it.", grammar=grammar, stream=True, details=True, max_new_tokens=60)
    assert json.loads("".join(piece.token.text for piece in pieces if not piece.token.special)) == text
