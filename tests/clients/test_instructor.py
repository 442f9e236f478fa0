"""instructor: typed answers in each mode that its users choose from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import anthropic
import instructor
import openai
import pytest
from instructor import Mode

from tests.clients.questions import MODEL, PERSON, Person, Verdict
from tests.system.server import Server

CHAT_MODES = ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "RESPONSES_TOOLS"]
"""Those in which the server has a part: MD_JSON only asks in words, so that what comes is up to the model."""


def chat(server: Server, mode: str) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    return instructor.from_openai(client, mode=Mode[mode])


def messages(server: Server, mode: str) -> Any:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)
    return instructor.from_anthropic(client, mode=Mode[mode])


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_retries": 1, **more}


@pytest.mark.parametrize("mode", CHAT_MODES)
def test_a_typed_answer(server: Server, mode: str) -> None:
    limit = "max_output_tokens" if mode.startswith("RESPONSES") else "max_tokens"
    person = chat(server, mode).create(response_model=Person, **ask(PERSON, temperature=0, **{limit: 200}))
    assert isinstance(person, Person)


@pytest.mark.parametrize("mode", ["ANTHROPIC_TOOLS", "ANTHROPIC_JSON"])
def test_a_typed_message(server: Server, mode: str) -> None:
    typed = ask(PERSON, max_tokens=200, extra_body={"temperature": 0})
    assert isinstance(messages(server, mode).create(response_model=Person, **typed), Person)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_a_partial_stream(server: Server, mode: str) -> None:
    pieces = chat(server, mode).create_partial(
        response_model=Verdict, **ask("Judge it.", temperature=0, max_tokens=200)
    )
    *earlier, last = pieces
    assert earlier
    assert Verdict.model_validate(last.model_dump())


def test_a_list_as_it_comes(server: Server) -> None:
    people: Iterable[Person] = chat(server, "TOOLS_STRICT").create_iterable(
        response_model=Person, **ask("Describe three persons as JSON.", temperature=0, max_tokens=300)
    )
    assert all(isinstance(person, Person) for person in people)
