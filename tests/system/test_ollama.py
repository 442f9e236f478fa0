"""Ollama's Python client against the real server, at its own port and at the one that clients have fixed."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import ollama
import pytest

from tests.system.server import Server


def port_of(server: Server) -> int:
    return int(server.flags[server.flags.index("--ollama-port") + 1])


@pytest.fixture(scope="module", params=["own port", "ollama's port"])
def client(request: pytest.FixtureRequest, server: Server) -> Any:
    port = server.port if request.param == "own port" else port_of(server)
    return ollama.Client(host=f"http://127.0.0.1:{port}")


def test_one_conversation_has_one_answer_at_both_ports(server: Server, client: Any) -> None:
    messages = [{"role": "user", "content": "Größe? 日本語 😀"}]
    options = {"temperature": 0, "num_predict": 24}
    model = client.list().models[0].model
    whole = client.chat(model=model, messages=messages, options=options)
    parts = list(client.chat(model=model, messages=messages, options=options, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    body = {"messages": messages, "temperature": 0, "max_tokens": 24}
    chat = server.post("/v1/chat/completions", body)
    assert whole.message.content == chat["choices"][0]["message"]["content"]
    assert (whole.eval_count, whole.prompt_eval_count) == tuple(
        chat["usage"][name] for name in ("completion_tokens", "prompt_tokens")
    )
    assert parts[-1].eval_count == whole.eval_count


def test_a_schema_is_obeyed(client: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    answer = client.generate(
        model=f"{client.list().models[0].model}:latest", prompt="A number", format=schema, options={"seed": 1}
    )
    assert json.loads(answer.response)["n"] in (1, 2)


def test_the_front_page_is_known_at_ollamas_port_alone(server: Server) -> None:
    def page(port: int) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as response:
            return str(response.read().decode())

    assert page(port_of(server)) == "Ollama is running"
    assert page(server.port).startswith("tokenyard serves")
