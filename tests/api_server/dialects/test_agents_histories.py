"""What agents send in the histories of chats and messages: results with images, errors, tools of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from api_server.text.tokenizer import Tokenizer
from tests.api_server.conftest import LiveServer
from tests.api_server.dialects.test_anthropic import prompt_of
from tests.api_server.dialects.test_openai import post

USER: Any = {"role": "user", "content": "hi"}
IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PICTURE: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
USE: Any = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "read", "input": {"a": 1}}]}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}:"
    "{% for c in m.tool_calls or [] %}{{ c.id }}={{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% endfor %}{{ m.tool_call_id }};{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}/"
    "{{ t.function.parameters.properties | list | join(',') }};{% endfor %}"
)


@pytest.fixture(autouse=True)
def template(live: LiveServer, tokenizer: Tokenizer) -> Iterator[None]:
    """Shows all that there is."""
    live.double.max_model_len = 2048
    live.double.wait(lambda: live.state.max_model_len == 2048)
    own = tokenizer._tokenizer.chat_template
    tokenizer._tokenizer.chat_template = TEMPLATE
    yield
    tokenizer._tokenizer.chat_template = own


def message(live: LiveServer, tokenizer: Tokenizer, *turns: Any, **more: Any) -> str:
    response = post(live, "/v1/messages", {"messages": [USER, *turns], "max_tokens": 2, **more})
    assert response.status_code == 200, response.text
    return prompt_of(live, tokenizer).removeprefix("user:hi:;")


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": content, **more}]}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (result("no such file", is_error=True), "Error: no such file"),
        (result(None, is_error=True), "Error:"),
        (result([{"type": "text", "text": "a"}], is_error=True), "Error:\na"),
        (result("fine", is_error=False), "fine"),
        (result("fine", is_error=None), "fine"),
        (result([{"type": "tool_reference", "tool_name": "grep"}]), "[You have the tool grep.]"),
        (
            result(
                [{"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "x"}]}]
            ),
            "Title: T\nSource: S\n\nx",
        ),
        (
            result([{"type": "text", "text": "a"}, IMAGE]),
            "a\n[Here was an image. You cannot see it: you read text only.]",
        ),
    ],
)
def test_results_of_tools(live: LiveServer, tokenizer: Tokenizer, given: Any, shown: str) -> None:
    assert message(live, tokenizer, USE, given) == f'assistant::t1=read({{"a": 1}});tool:{shown}:t1;'


def test_only_an_image_that_is_asked_about_is_refused(live: LiveServer, tokenizer: Tokenizer) -> None:
    looked = {"role": "user", "content": [IMAGE, {"type": "text", "text": "what is it?"}]}
    refused = post(live, "/v1/messages", {"messages": [looked], "max_tokens": 2})
    assert (refused.status_code, "'image' is not supported" in refused.text) == (400, True)
    assert "an image" in message(live, tokenizer, looked, {"role": "assistant", "content": "hm"}, USER)
    seen = {"role": "user", "content": [PICTURE, {"type": "text", "text": "what is it?"}]}
    body = {"messages": [seen, {"role": "assistant", "content": "hm"}, USER], "max_tokens": 2}
    assert post(live, "/v1/chat/completions", body).status_code == 200
    assert "an image" in prompt_of(live, tokenizer)
    assert post(live, "/v1/chat/completions", {"messages": [seen], "max_tokens": 2}).status_code == 400


def test_a_tool_message_with_an_image(live: LiveServer, tokenizer: Tokenizer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [PICTURE]},
    ]
    assert post(live, "/v1/chat/completions", {"messages": turns, "max_tokens": 2}).status_code == 200
    assert "tool:[Here was an image" in prompt_of(live, tokenizer)


def test_tools_that_ran_elsewhere_are_left_out(live: LiveServer, tokenizer: Tokenizer) -> None:
    searched = {
        "role": "assistant",
        "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "text", "text": "found", "citations": [{"type": "web_search_result_location"}]},
        ],
    }
    assert message(live, tokenizer, searched, USER) == "assistant:found:;user:hi:;"


def test_anthropics_own_tools_have_their_schemas(live: LiveServer, tokenizer: Tokenizer) -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 8, "display_height_px": 6},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"name": "mine", "input_schema": {"type": "object"}, "defer_loading": True, "allowed_callers": ["direct"]},
    ]
    prompt = message(live, tokenizer, tools=tools)
    shown = dict(each.split("/") for each in prompt.rstrip(";").split(";"))
    assert list(shown) == ["bash", "str_replace_based_edit_tool", "memory", "computer", "mine"]
    assert shown["bash"] == "command,restart"
    assert {"path", "old_str", "new_str", "view_range"} <= set(shown["str_replace_based_edit_tool"].split(","))
    assert {"old_path", "new_path"} <= set(shown["memory"].split(","))
    assert {"action", "coordinate"} <= set(shown["computer"].split(","))


def test_the_old_form_of_a_call_is_a_call(live: LiveServer, tokenizer: Tokenizer) -> None:
    turns = [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "read", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "read", "content": "text"},
        {"role": "assistant", "content": "so", "function_call": None, "audio": None},
        USER,
    ]
    assert post(live, "/v1/chat/completions", {"messages": turns, "max_tokens": 2}).status_code == 200
    assert prompt_of(live, tokenizer) == (
        'user:hi:;assistant::call_1=read({"a": 1});tool:text:call_1;assistant:so:;user:hi:;'
    )
    heard = [USER, {"role": "assistant", "audio": {"id": "a1"}}, USER]
    refused = post(live, "/v1/chat/completions", {"messages": heard, "max_tokens": 2})
    assert refused.json()["error"]["param"] == "messages[1].audio.id"


@pytest.mark.parametrize(
    "body",
    [
        {"stream_options": {}}, {"stream_options": {"include_usage": False}}, {"modalities": []},
        {"stream_options": {"include_obfuscation": False}, "stream": True}, {"functions": []}, {"n": 1.0},
        {"tools": [], "tool_choice": {"type": "auto"}}, {"max_tokens": 4.0, "top_logprobs": 0.0, "seed": 7.0},
        {"tools": [{"type": "web_search"}, {"type": "function", "function": {"name": "f", "parameters": {}}}]},
    ],
)  # fmt: skip
def test_what_asks_for_nothing_passes(live: LiveServer, body: dict[str, Any]) -> None:
    response = post(live, "/v1/chat/completions", {"messages": [USER], "max_tokens": 4, **body})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "hi", "parameters": {"max_new_tokens": 3.0, "top_k": 5.0, "seed": 2.0}}),
        ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 3.0, "top_k": 5.0}}),
        ("/generate", {"input_ids": [5.0, 6, 7.0], "sampling_params": {"max_new_tokens": 3.0}}),
        ("/v1/completions", {"prompt": [5.0, 6], "max_tokens": 3.0, "logprobs": 1.0}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 3.0, "top_k": 5.0}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3.0}),
    ],
)
def test_whole_floats_are_integers_in_every_dialect(live: LiveServer, path: str, body: dict[str, Any]) -> None:
    response = post(live, path, body)
    assert response.status_code == 200, response.text
    assert live.double.submits[-1].text.sampling_params.max_new_tokens == 3


NULLS = {
    "/v1/chat/completions": {"refusal", "logprobs", "finish_reason"},
    "/v1/completions": {"logprobs", "finish_reason"},
    "/v1/messages": {"stop_sequence", "stop_reason"},
    "/v1/responses": {
        "completed_at", "error", "incomplete_details", "instructions", "max_output_tokens", "max_tool_calls",
        "previous_response_id", "effort", "summary", "usage", "user",
    },
}  # fmt: skip
"""What the references send as null, where there is nothing to tell. Typed clients take absence for everything else."""


def nulls(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(nulls, value))
    if not isinstance(value, dict):
        return set()
    return {name for name, inner in value.items() if inner is None}.union(*map(nulls, value.values()))


@pytest.mark.parametrize("path", NULLS)
def test_nulls_are_those_of_the_references(live: LiveServer, path: str) -> None:
    given: dict[str, Any] = {"messages": [USER], "input": "hi", "prompt": "hi", "max_tokens": 5}
    wanted = {
        "/v1/chat/completions": ("messages", "max_tokens"),
        "/v1/completions": ("prompt", "max_tokens"),
        "/v1/messages": ("messages", "max_tokens"),
        "/v1/responses": ("input",),
    }[path]
    body = {name: given[name] for name in wanted}
    assert nulls(post(live, path, body).json()) <= NULLS[path]
    lines = post(live, path, body | {"stream": True}).text.splitlines()
    frames = [orjson.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert frames
    assert set().union(*map(nulls, frames)) <= NULLS[path]
