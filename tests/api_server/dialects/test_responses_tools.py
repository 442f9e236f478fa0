"""Tools and items of the Responses API, as Codex and its like send them, and what comes back."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from api_server.answers.formats import AnswerFormats
from api_server.dialects.openai.responses.schema import ResponseEvent
from api_server.dialects.openai.responses.tools import Toolbox, input_of, text_of
from api_server.errors import RequestFailed
from api_server.text.tokenizer import Tokenizer
from interfaces.pipelines.parsers import ParsedToolCall
from shared.settings import Settings
from tests.api_server.conftest import LiveServer
from tests.api_server.dialects.test_anthropic import events_of, prompt_of
from tests.api_server.dialects.test_openai import post, says

PATH = "/v1/responses"
READ: Any = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}
PATCH: Any = {"type": "custom", "name": "patch", "description": "changes a file", "format": {"type": "text"}}
GROUP: Any = {"type": "namespace", "name": "mcp__files", "description": "d", "tools": [READ, PATCH]}
SEARCH: Any = {"type": "web_search", "external_web_access": False}
USER: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}:{{ m.reasoning_content }}:"
    "{% for c in m.tool_calls or [] %}{{ c.id }}={{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% endfor %}{{ m.tool_call_id }};{% endfor %}"
)


@pytest.fixture(autouse=True)
def formats(live: LiveServer, tokenizer: Tokenizer) -> None:
    live.state.formats = AnswerFormats.of(Settings(tool_parser="hermes", reasoning_parser="think"), tokenizer)
    live.double.max_model_len = 2048
    live.double.wait(lambda: live.state.max_model_len == 2048)


@pytest.fixture
def client(live: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def called(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def names(tools: list[Any]) -> list[str]:
    return [function["function"]["name"] for function in Toolbox.of(tools).functions]


def test_every_tool_that_a_client_runs_is_a_function() -> None:
    assert names([READ, PATCH, GROUP]) == ["read", "patch", "mcp__files__read", "mcp__files__patch"]
    assert names([{**GROUP, "name": "mcp__files__"}]) == ["mcp__files__read", "mcp__files__patch"]
    assert names([{"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}]) == [
        "local_shell",
        "shell",
        "apply_patch",
    ]
    assert names([{"type": "shell", "environment": {"type": "local"}}]) == ["shell"]


@pytest.mark.parametrize(
    "tool",
    [SEARCH, {"type": "web_search_preview_2025_03_11"}, {"type": "image_generation"}, {"type": "mcp"},
     {"type": "code_interpreter", "container": {"type": "auto"}}, {"type": "tool_search"},
     {"type": "shell", "environment": {"type": "container_auto"}}],
)  # fmt: skip
def test_what_servers_run_is_left_out_beside_functions_and_refused_alone(tool: Any) -> None:
    assert names([tool, READ]) == ["read"]
    with pytest.raises(RequestFailed, match="which servers run themselves") as refused:
        Toolbox.of([tool])
    assert refused.value.field == "tools[0].type"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, None),
        ("required", "required"),
        ({"type": "custom", "name": "patch"}, {"type": "function", "name": "patch"}),
        ({"type": "apply_patch"}, {"type": "function", "name": "apply_patch"}),
        ({"type": "function", "name": "read", "namespace": "n"}, {"type": "function", "name": "n__read"}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [SEARCH, {"type": "custom", "name": "patch"}]},
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "patch"}]},
        ),
    ],
)
def test_choices(given: Any, wanted: Any) -> None:
    assert Toolbox().choice(given) == wanted


def test_a_tool_of_a_server_cannot_be_chosen() -> None:
    with pytest.raises(RequestFailed, match="web_search"):
        Toolbox().choice({"type": "web_search_preview"})


@pytest.mark.parametrize(
    ("form", "schema", "strict"),
    [
        ({"type": "grammar", "syntax": "regex", "definition": "a|b"}, {"pattern": "^(?:a|b)$"}, True),
        (
            {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'},
            {"description": 'A text of this grammar (Lark):\nstart: "a"'},
            False,
        ),
        (None, {}, False),
    ],
)
def test_formats_of_a_custom_tool(form: Any, schema: dict[str, Any], strict: bool) -> None:
    (function,) = Toolbox.of([{**PATCH, "format": form}]).functions
    assert function["function"]["parameters"]["properties"]["input"] == {"type": "string", **schema}
    assert function["function"]["strict"] is strict


@pytest.mark.parametrize("text", ["", '*** Begin\n+a "b" \\ \t日本 😀\x01', "x" * 5000])
def test_the_text_of_a_custom_call(text: str) -> None:
    assert text_of(input_of(text)) == text
    assert text_of(json.dumps({"input": text})) == text
    whole = json.dumps({"input": text}, ensure_ascii=True)
    for end in range(len('{"input": "'), min(len(whole), 80)):
        assert text.startswith(text_of(whole[:end]).rstrip("\ud83d"))


def test_other_arguments_of_a_custom_call() -> None:
    assert text_of("") == ""
    assert text_of('{"patch": "x"}') == '{"patch": "x"}'
    assert text_of('{"a": 1, "input": "x"}') == "x"


@pytest.mark.parametrize(
    ("tool", "arguments", "facts"),
    [
        (READ, {"a": 1}, {"type": "function_call", "name": "read", "arguments": '{"a": 1}'}),
        (PATCH, {"input": "x"}, {"type": "custom_tool_call", "name": "patch", "input": "x"}),
        (
            {"type": "local_shell"},
            {"command": ["ls"]},
            {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        ),
        (
            {"type": "shell"},
            {"commands": ["ls"], "timeout_ms": 5},
            {"type": "shell_call", "action": {"commands": ["ls"], "timeout_ms": 5, "max_output_length": None}},
        ),
        (
            {"type": "apply_patch"},
            {"type": "delete_file", "path": "p"},
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "p"}},
        ),
    ],
)
def test_calls_come_back_as_the_client_knows_them(tool: Any, arguments: Any, facts: dict[str, Any]) -> None:
    toolbox = Toolbox.of([tool])
    name = toolbox.functions[0]["function"]["name"]
    call = ParsedToolCall("c1", name, json.dumps(arguments))
    assert toolbox.item(call, begun=False) == {"call_id": "c1", **facts}
    cut = ParsedToolCall("c1", name, '{"inp')
    assert toolbox.item(cut, begun=True)["call_id"] == toolbox.item(cut, begun=False)["call_id"] == "c1"


def test_what_codex_sends_is_served(client: openai.OpenAI, live: LiveServer, tokenizer: Tokenizer) -> None:
    """Names come back with their namespaces, and a custom tool's text as a text, whole and streamed."""
    read, patch = called("mcp__files__read", {"a": 1}), called("patch", {"input": 'x é"y'})
    says(live.double, tokenizer, f"<think>\nhm\n</think>\n\n{read}\n{patch}")
    asked: dict[str, Any] = {
        "model": "", "input": [USER], "tools": [PATCH, GROUP, SEARCH], "tool_choice": "auto", "store": True,
        "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "medium", "summary": "auto"},
        "parallel_tool_calls": True, "max_output_tokens": 400, "truncation": "auto", "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
    }  # fmt: skip
    whole = client.responses.create(**asked)
    reasoning, function, custom = whole.output
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.summary] == ["hm"]
    assert live.state.seal.opened(reasoning.encrypted_content or "") == "hm"
    assert function.type == "function_call"
    assert (function.name, function.namespace, function.arguments) == ("read", "mcp__files", '{"a": 1}')
    assert custom.type == "custom_tool_call"
    assert (custom.name, custom.namespace, custom.input) == ("patch", None, 'x é"y')
    raw = whole.model_dump(exclude_unset=True)
    assert raw["reasoning"] == {"effort": "medium", "summary": "auto"}
    assert (raw["store"], raw["truncation"]) == (False, "auto")
    assert "namespace" not in raw["output"][2]

    events = events_of(post(live, PATH, asked | {"stream": True}).text)
    for event in events:
        assert ResponseEvent.model_validate(event).model_dump(exclude_unset=True) == event
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "function_call", "custom_tool_call"]
    assert done == events[-1]["response"]["output"]
    kinds = [event["type"].removeprefix("response.") for event in events]
    first = kinds.index("output_item.done")
    told = list(dict.fromkeys(kinds[2:first]))
    assert told == [
        "output_item.added", "reasoning_summary_part.added", "content_part.added", "reasoning_summary_text.delta",
        "reasoning_text.delta", "reasoning_summary_text.done", "reasoning_summary_part.done", "reasoning_text.done",
        "content_part.done",
    ]  # fmt: skip
    said = {"reasoning_summary_text.delta": "hm", "custom_tool_call_input.delta": 'x é"y'}
    for kind, text in said.items():
        assert "".join(event["delta"] for event in events if event["type"] == f"response.{kind}") == text
    with client.responses.stream(**asked) as stream:
        assert [item.type for item in stream.get_final_response().output] == [item["type"] for item in done]


def test_what_was_not_asked_for_is_not_told(live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live.double, tokenizer, "<think>\nhm\n</think>\n\nyes")
    reasoning = post(live, PATH, {"input": "hi"}).json()["output"][0]
    assert reasoning["summary"] == []
    assert "encrypted_content" not in reasoning
    assert "summary" not in post(live, PATH, {"input": "hi", "stream": True}).text.replace('"summary":', "")


@pytest.fixture
def shown(live: LiveServer, tokenizer: Tokenizer) -> Any:
    """The prompt that a history becomes, by a template that shows everything."""
    own = tokenizer._tokenizer.chat_template
    tokenizer._tokenizer.chat_template = TEMPLATE

    def prompt(*items: Any) -> str:
        response = post(live, PATH, {"input": [USER, *items], "max_output_tokens": 2})
        assert response.status_code == 200, response.text
        return prompt_of(live, tokenizer)

    yield prompt
    tokenizer._tokenizer.chat_template = own


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        (
            [
                {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "ok"}]},
            ],
            'assistant:::c=patch({"input": "x"});tool:ok::c;',
        ),
        (
            [{"type": "function_call", "call_id": "c", "name": "read", "namespace": "n", "arguments": "{}"}],
            "assistant:::c=n__read({});",
        ),
        (
            [
                {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"], "env": {}}},
                {"type": "local_shell_call_output", "id": "c", "output": "a b"},
            ],
            'assistant:::c=local_shell({"command": ["ls"]});tool:a b::c;',
        ),
        (
            [
                {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "p"}},
                {"type": "apply_patch_call_output", "call_id": "c", "status": "failed", "output": "no p"},
            ],
            'assistant:::c=apply_patch({"type": "delete_file", "path": "p"});tool:failed: no p::c;',
        ),
        (
            [{"type": "mcp_call", "id": "c", "server_label": "s", "name": "f", "arguments": "{}", "output": "7"}],
            "assistant:::c=s__f({});tool:7::c;",
        ),
        ([{"type": "web_search_call", "id": "w", "status": "completed"}, {"type": "compaction", "id": "x"}], ""),
    ],
)
def test_items_of_a_history(shown: Any, items: list[Any], turns: str) -> None:
    assert shown(*items) == f"user:hi::;{turns}"


def test_reasoning_comes_back_sealed(shown: Any, live: LiveServer) -> None:
    answer = {"role": "assistant", "content": "yes"}
    sealed = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": live.state.seal.sealed("hm 日")}
    assert shown(sealed, answer) == "user:hi::;assistant:yes:hm 日:;"
    assert shown({**sealed, "encrypted_content": "gAAAAAB"}, answer) == "user:hi::;assistant:yes::;"
    assert shown({**sealed, "content": [{"type": "reasoning_text", "text": "own"}]}, answer).count("own") == 1


def test_an_image_that_a_tool_has_found_ends_nothing(shown: Any) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    call = {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"}
    prompt = shown(call, {"type": "function_call_output", "call_id": "c", "output": [image]})
    assert "an image" in prompt
    assert "cannot see" in prompt
    assert "an image" in shown({"role": "user", "content": [image]}, {"role": "assistant", "content": "hm"}, USER)


def test_the_oldest_turns_go_if_asked(live: LiveServer, tokenizer: Tokenizer, client: openai.OpenAI) -> None:
    live.double.max_model_len = 256
    live.double.wait(lambda: live.state.max_model_len == 256)
    talk: list[Any] = [{"role": "system", "content": "be brief"}]
    for i in range(12):
        talk += [{"role": "user", "content": f"question {i} " + "fox " * 10}, {"role": "assistant", "content": f"a{i}"}]
    talk.append({"role": "user", "content": "the last one"})
    whole = {"input": talk, "max_output_tokens": 20}
    assert post(live, PATH, whole).json()["error"]["code"] == "context_length_exceeded"
    assert post(live, PATH, whole | {"truncation": "auto"}).status_code == 200
    prompt = prompt_of(live, tokenizer)
    assert "be brief" in prompt
    assert "the last one" in prompt
    assert ("question 0" in prompt, "question 11" in prompt) == (False, True)
    assert len(live.double.submits[-1].text.tokens.prompt) <= 236
    endless = {"input": "fox " * 3000, "truncation": "auto"}
    assert post(live, PATH, endless).json()["error"]["code"] == "context_length_exceeded"


def test_tokens_are_counted(client: openai.OpenAI, live: LiveServer) -> None:
    asked: Any = {"model": "tiny-chat", "input": [USER], "tools": [READ, SEARCH], "instructions": "be brief"}
    count = client.responses.input_tokens.count(**asked)
    usage = client.responses.create(**asked, max_output_tokens=3).usage
    assert usage is not None
    assert count.input_tokens == usage.input_tokens > 0
    assert len(live.double.submits) == 1


def test_compaction_is_refused_only_when_it_would_act(live: LiveServer) -> None:
    def status(limit: int) -> int:
        edit = {"type": "compaction", "compact_threshold": limit}
        return post(live, PATH, {"input": "hi", "max_output_tokens": 2, "context_management": [edit]}).status_code

    assert (status(1000), status(3)) == (200, 400)
