"""Items of a Responses conversation that stand for calls and their results, as turns of a chat.

Knows each type of item, also those that only other servers write: what a model could read of them is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from api_server.body.unknown_fields import report
from api_server.chat.media_parts import LOADED
from api_server.chat.messages import text_content
from api_server.dialects.openai.responses.tools import Tool, input_of
from api_server.errors import invalid

PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}

# Items that another server has made, or can read, in a conversation that goes on here.
_LEFT_OUT = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "image_generation_call",
        "code_interpreter_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "tool_search_call",
        "tool_search_output",
        "additional_tools",
        "compaction",
        "compaction_summary",
        "ghost_snapshot",
        "program",
        "program_output",
    }
)

Turns = list[dict[str, Any]]


def turns_of(item: Mapping[str, Any], path: str) -> Turns | None:
    """The turns of an item, empty if it is left out; None for an unknown type."""
    kind = item.get("type")
    if isinstance(kind, str) and kind in _LEFT_OUT:
        report(f"item {kind}", "an item of type %.100r, which another server has made, is left out of a request", kind)
        return []
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    return None if reader is None else reader(item, path)


def content(given: Any, path: str, unseen: bool = False) -> Any:
    """A text, or parts in the form of chats."""
    found = text_content(given, path, PARTS, unseen)
    if isinstance(found, str):
        return found
    return [part if isinstance(part, LOADED) else part.model_dump() for part in found]


def _call(call_id: Any, name: str, arguments: Any) -> Turns:
    function = {"name": name, "arguments": arguments}
    return [{"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": function}]}]


def _function_call(item: Mapping[str, Any], path: str) -> Turns:
    return _call(item.get("call_id"), _shown_name(item, path), item.get("arguments") or "{}")


def _custom_tool_call(item: Mapping[str, Any], path: str) -> Turns:
    return _call(item.get("call_id"), _shown_name(item, path), input_of(item.get("input")))


def _shown_name(item: Mapping[str, Any], path: str) -> str:
    name = item.get("name")
    namespace = item.get("namespace")
    if not isinstance(name, str):
        raise invalid(f"{path}.name is missing: the name of the function", f"{path}.name")
    return Tool("function", name, namespace if isinstance(namespace, str) else None).shown_name


def _own_call(name: str, key: str) -> Callable[[Mapping[str, Any], str], Turns]:
    """Makes a reader of calls of an OpenAI tool: the arguments are an object under `key`."""

    def read(item: Mapping[str, Any], path: str) -> Turns:
        given = item.get(key)
        if not isinstance(given, Mapping):
            raise invalid(f"{path}.{key} must be an object", f"{path}.{key}")
        arguments = {k: v for k, v in given.items() if v not in (None, {}) and (k, v) != ("type", "exec")}
        return _call(item.get("call_id"), name, orjson.dumps(arguments).decode())

    return read


def _output(item: Mapping[str, Any], path: str) -> Turns:
    output = item.get("output")
    return [_result(item, path, "" if output is None else content(output, f"{path}.output", unseen=True))]


def _shell_output(item: Mapping[str, Any], path: str) -> Turns:
    output = item.get("output")
    return [_result(item, path, output if isinstance(output, str) else orjson.dumps(output).decode())]


def _patch_output(item: Mapping[str, Any], path: str) -> Turns:
    return [_result(item, path, f"{item.get('status')}: {item.get('output') or ''}".removesuffix(": "))]


def _result(item: Mapping[str, Any], path: str, text: Any) -> dict[str, Any]:
    # A local shell's output is named by the id of its call, everything else by call_id.
    call_id = item.get("call_id") or (item.get("id") if item.get("type") == "local_shell_call_output" else None)
    if not isinstance(call_id, str):
        raise invalid(f"{path}.call_id is missing: the id of the call that this answers", f"{path}.call_id")
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _mcp_call(item: Mapping[str, Any], path: str) -> Turns:
    """A call that another server has made, with its result."""
    name = Tool("function", str(item.get("name")), str(item.get("server_label"))).shown_name
    output = item.get("output") if item.get("error") is None else f"Error: {item['error']}"
    call_id = str(item.get("id"))
    arguments = item.get("arguments") or "{}"
    return [*_call(call_id, name, arguments), {"role": "tool", "tool_call_id": call_id, "content": str(output or "")}]


_READERS: dict[str, Callable[[Mapping[str, Any], str], Turns]] = {
    "function_call": _function_call,
    "function_call_output": _output,
    "custom_tool_call": _custom_tool_call,
    "custom_tool_call_output": _output,
    "local_shell_call": _own_call("local_shell", "action"),
    "local_shell_call_output": _shell_output,
    "shell_call": _own_call("shell", "action"),
    "shell_call_output": _shell_output,
    "apply_patch_call": _own_call("apply_patch", "operation"),
    "apply_patch_call_output": _patch_output,
    "mcp_call": _mcp_call,
}
