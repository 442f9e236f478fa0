"""`python -m benchmarks.answers --model MODEL`: whether a real model answers as its users ask it, end to end.

Serves a model, a GGUF file for instance, and asks for a chat, the same as a stream, a call of a tool, and JSON of a
schema. Prints what came, and ends with status 1 if an answer is not of the form that was asked for: a model's knowledge
is its own matter. For checks by hand, since real models are no part of the repository.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.server import free_port, running, serve_command, wait_until_ready

# Seconds until a server must be ready, and until an answer must be there.
START_SECONDS = 600.0
ANSWER_SECONDS = 300.0

_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Question(NamedTuple):
    """What is asked of /v1/chat/completions, and what says whether an answer has the form that was asked for."""

    name: str
    text: str
    fields: dict[str, Any]
    holds: Callable[[dict[str, Any]], bool]


def _is_call(message: dict[str, Any]) -> bool:
    calls = message.get("tool_calls") or [{}]
    function = calls[0].get("function", {})
    return function.get("name") == "get_weather" and "city" in json.loads(function["arguments"])


def _is_person(message: dict[str, Any]) -> bool:
    person = json.loads(message["content"])
    return set(person) == {"name", "age"} and isinstance(person["age"], int)


QUESTIONS = (
    Question("chat", "Say in one sentence what a fox is.", {}, lambda message: bool(message["content"].strip())),
    Question("a tool", "What is the weather in Paris?", {"tools": [_WEATHER], "tool_choice": "required"}, _is_call),
    Question(
        "JSON",
        "Invent a person.",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON}}},
        _is_person,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.answers", description=__doc__)
    parser.add_argument("--model", required=True, help="a folder, a name on the hub, or a GGUF file")
    parser.add_argument("flags", nargs="*", help="flags of tokenyard serve, after --")
    options = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = serve_command(port, [str(options.model), *options.flags])
        with running(command, log) as process:
            asyncio.run(wait_until_ready(url, process, log, START_SECONDS))
            return _ask_all(url, Console())


def _ask_all(url: str, console: Console) -> int:
    """Ask every question, once whole and once as a stream. Returns the exit status."""
    failed = 0
    for question in QUESTIONS:
        whole = _ask(url, question)
        streamed = _joined(_stream(url, question))
        right = _holds(question, whole) and _holds(question, streamed)
        failed += not right
        console.print(f"{question.name}: {'right' if right else 'WRONG'}", highlight=False)
        for name, message in (("whole", whole), ("stream", streamed)):
            console.print(f"  {name}: {json.dumps(message, ensure_ascii=False)}", markup=False, highlight=False)
    return int(failed > 0)


def _holds(question: Question, message: dict[str, Any]) -> bool:
    try:
        return question.holds(message)
    except (ValueError, LookupError, TypeError, AttributeError):
        return False


def _request(url: str, question: Question, stream: bool) -> urllib.request.Request:
    body = {
        "messages": [{"role": "user", "content": question.text}],
        "temperature": 0,
        "max_tokens": 120,
        "stream": stream,
        **question.fields,
    }
    return urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )


def _ask(url: str, question: Question) -> dict[str, Any]:
    with urllib.request.urlopen(_request(url, question, False), timeout=ANSWER_SECONDS) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
    return {key: value for key, value in message.items() if value}


def _stream(url: str, question: Question) -> list[dict[str, Any]]:
    """Return the deltas of a streamed answer."""
    with urllib.request.urlopen(_request(url, question, True), timeout=ANSWER_SECONDS) as response:
        lines = [line.decode().strip() for line in response]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def _joined(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the deltas of a text, and of the arguments of a single call."""
    message: dict[str, Any] = {"content": "".join(delta.get("content") or "" for delta in deltas)}
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    if calls:
        functions = [call.get("function") or {} for call in calls]
        name = next((function["name"] for function in functions if function.get("name")), "")
        arguments = "".join(function.get("arguments") or "" for function in functions)
        message["tool_calls"] = [{"function": {"name": name, "arguments": arguments}}]
    return message


if __name__ == "__main__":
    raise SystemExit(main())
