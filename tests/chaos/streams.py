"""The requests whose answers must not change, in every dialect, and what of an answer must not change.

How tokens are cut into events depends on timing, and ids and times differ by design: everything else is compared.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]
LENGTH = 160
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "ages": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
JSON_FORM = {"name": "person", "schema": SCHEMA}
TOOL = {"type": "function", "function": {"name": "tell", "parameters": SCHEMA}}


@dataclass(frozen=True)
class Request:
    path: str
    body: dict[str, Any]
    facts_of: Callable[[list[Event]], Any]


@dataclass
class Heard:
    """A stream as its client got it: `facts` are what must be the same, `pause` the longest silence."""

    facts: Any = None
    pause: float = 0.0
    comments: int = 0
    problem: str = ""
    events: list[Event] = field(default_factory=list)


def chat_facts(events: list[Event]) -> Any:
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event.get("choices", []):
            facts = choices.setdefault(choice["index"], {"text": "", "logprobs": [], "calls": {}, "finish": None})
            facts["text"] += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or []:
                # Ids are random.
                said = call["function"].get("name") or "", call["function"].get("arguments") or ""
                facts["calls"][call["index"]] = "".join([facts["calls"].get(call["index"], ""), *said])
            facts["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
            facts["finish"] = choice["finish_reason"] or facts["finish"]
    return choices


def completion_facts(events: list[Event]) -> Any:
    choices: dict[int, list[Any]] = {}
    for event in events:
        for choice in event.get("choices", []):
            facts = choices.setdefault(choice["index"], ["", None])
            facts[0] += choice["text"]
            facts[1] = choice["finish_reason"] or facts[1]
    return choices


def messages_facts(events: list[Event]) -> Any:
    text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    ends = [event for event in events if event["type"] == "message_delta"]
    return text, [(end["delta"]["stop_reason"], end["usage"]["output_tokens"]) for end in ends]


def tgi_facts(events: list[Event]) -> Any:
    tokens = [(event["token"]["id"], event["token"]["logprob"], event["token"]["text"]) for event in events]
    return tokens, events[-1]["generated_text"], events[-1].get("details")


def sglang_facts(events: list[Event]) -> Any:
    last = events[-1]
    return last["text"], last["output_ids"], last["meta_info"]["finish_reason"]


def requests(count: int) -> list[Request]:
    """Greedy and sampled, one answer and two, with log-probabilities, as JSON, as calls of a tool; in all dialects."""
    made = []
    for i in range(count):
        prompt = f"{i} " + "The quick brown fox jumps over the lazy dog. 日本語 def f(x): "[i % 7 :] * (1 + i % 4)
        sampled = {"temperature": i // 8 % 2}
        chat = {"messages": [{"role": "user", "content": prompt}], "stream": True, "seed": i, "max_tokens": LENGTH}
        made.append(
            [
                Request("/v1/chat/completions", {**chat, **sampled, "ignore_eos": True}, chat_facts),
                Request("/v1/chat/completions", {**chat, "n": 2, "temperature": 1, "ignore_eos": True}, chat_facts),
                Request(
                    "/v1/chat/completions",
                    {**chat, **sampled, "logprobs": True, "top_logprobs": 2, "ignore_eos": True},
                    chat_facts,
                ),
                Request(
                    "/v1/completions",
                    {"prompt": prompt, "stream": True, "seed": i, "max_tokens": LENGTH, "ignore_eos": True, **sampled},
                    completion_facts,
                ),
                Request(
                    "/v1/messages",
                    {
                        "model": "tgi",
                        "messages": chat["messages"],
                        "max_tokens": LENGTH,
                        "stream": True,
                        "temperature": 0,
                    },
                    messages_facts,
                ),
                Request(
                    "/generate_stream",
                    {
                        "inputs": prompt,
                        "parameters": {
                            "max_new_tokens": LENGTH,
                            "seed": i + 1,
                            "details": True,
                            "do_sample": bool(sampled["temperature"]),
                        },
                    },
                    tgi_facts,
                ),
                Request(
                    "/generate",
                    {
                        "text": prompt,
                        "stream": True,
                        "sampling_params": {
                            "max_new_tokens": LENGTH,
                            "sampling_seed": i,
                            "ignore_eos": True,
                            **sampled,
                        },
                    },
                    sglang_facts,
                ),
                Request(
                    "/v1/chat/completions",
                    {**chat, "temperature": 1, "response_format": {"type": "json_schema", "json_schema": JSON_FORM}},
                    chat_facts,
                ),
                Request(
                    "/v1/chat/completions",
                    {**chat, "temperature": 1, "tools": [TOOL], "tool_choice": "required"},
                    chat_facts,
                ),
            ][i % 9]
        )
    return made


def read(port: int, request: Request, headers: dict[str, str] | None = None, timeout: float = 90) -> Heard:
    """Runs one request to its end. What goes wrong is a `problem`, not an exception: the others go on."""
    heard = Heard()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        last = time.monotonic()
        all_headers = {"Content-Type": "application/json"} | (headers or {})
        connection.request("POST", request.path, json.dumps(request.body), all_headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            heard.problem = f"{response.status} {response.read(500)!r}"
            return heard
        for event in _events(response, heard):
            now = time.monotonic()
            heard.pause, last = max(heard.pause, now - last), now
            heard.events.append(event)
        if any("error" in event for event in heard.events):
            heard.problem = f"an error in the stream: {heard.events[-1]}"
        else:
            heard.facts = request.facts_of(heard.events)
    except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
        heard.problem = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return heard


def _events(response: http.client.HTTPResponse, heard: Heard) -> Iterator[Event]:
    for line in response:
        if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[5:])
        elif line.startswith(b":"):
            heard.comments += 1
