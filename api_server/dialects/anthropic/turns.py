"""Turns Anthropic's messages, whose content is a list of blocks, into messages of chat templates.

A turn of the assistant has text, thinking and calls; the results of calls are blocks of the user's turn there, and
messages of their own here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from api_server.body.unknown_fields import report
from api_server.chat.messages import last_answer, text_content
from api_server.errors import invalid
from interfaces import MessageContent, TextContentPart, TextGenerationRequestMessage

_ROLES = ("user", "assistant", "system")
_BLOCKS = {"text": "text"}
# Blocks without content that the model could read.
_NOT_SHOWN = ("redacted_thinking", "container_upload", "compaction")
# Tools that another server has run in a conversation that goes on here.
_RUN_ELSEWHERE = re.compile(r"server_tool_use|mcp_tool_use|\w+_tool_result")


@dataclass
class _Turn:
    """The content of one message: results of calls, thinking, text, calls."""

    role: str
    parts: list[MessageContent] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[TextGenerationRequestMessage] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.parts or self.thoughts or self.calls or self.results)


def turns(given: Sequence[Any]) -> list[TextGenerationRequestMessage]:
    """Joins messages of one role in a row to one turn. An empty last message of the assistant is dropped.

    Raises RequestFailed for the first message that is wrong.
    """
    last = len(given) - 1
    answered = last_answer(given)
    read = [_turn(message, f"messages[{i}]", i == last, i < answered) for i, message in enumerate(given)]
    found = [
        m for role, group in groupby(filter(None, read), key=lambda t: t.role) for m in _messages(role, list(group))
    ]
    if not found:
        raise invalid("messages must have a turn that is not empty", "messages")
    if found[-1].role == "assistant":
        _check_continued(found[-1], f"messages[{last}].content")
    return found


def system_parts(given: Any) -> list[MessageContent]:
    """The content of the system prompt."""
    return [*_texts(given, "system")]


def _check_continued(turn: TextGenerationRequestMessage, path: str) -> None:
    """Checks a last turn of the assistant, which the answer continues: it must be a text."""
    if turn.tool_calls:
        raise invalid(f"{path}: the final assistant content has a tool_use, which needs its tool_result", path)
    if turn.text != turn.text.rstrip():
        raise invalid(f"{path}: the final assistant content cannot end with trailing whitespace: strip it", path)


def _messages(role: Any, group: list[_Turn]) -> list[TextGenerationRequestMessage]:
    found = [result for turn in group for result in turn.results]
    parts = [part for turn in group for part in turn.parts]
    calls = [call for turn in group for call in turn.calls]
    thoughts = "\n".join(thought for turn in group for thought in turn.thoughts)
    if parts or calls or thoughts:
        more: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if thoughts:
            more["reasoning_content"] = thoughts
        found.append(TextGenerationRequestMessage(role=role, content=[*parts], **more))
    return found


def _turn(given: Any, path: str, last: bool, answered: bool) -> _Turn:
    role = given.get("role")
    if role not in _ROLES:
        raise invalid(f"{path}.role must be one of {', '.join(_ROLES)}, got {role!r:.100}", f"{path}.role")
    content = given.get("content")
    turn = _Turn(role)
    path = f"{path}.content"
    if last and role == "assistant" and content in ("", []):
        return turn
    if not isinstance(content, list):
        turn.parts = _texts(content, path)
        return turn
    if not content:
        raise invalid(f"{path} must not be empty, nor any text in it", path)
    for i, block in enumerate(content):
        _read(block, turn, f"{path}[{i}]", unseen=answered or role != "user")
    return turn


def _read(block: Any, turn: _Turn, path: str, unseen: bool) -> None:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "tool_use" and turn.role == "assistant":
        turn.calls.append(_call(block, path))
    elif kind == "tool_result" and turn.role == "user":
        turn.results.append(_result(block, path))
    elif kind == "thinking" and turn.role == "assistant":
        turn.thoughts.append(_text(block, "thinking", path))
    elif kind in ("tool_use", "tool_result", "thinking"):
        raise invalid(f"{path} of type {kind!r} cannot be in a turn of the {turn.role}", path)
    elif isinstance(kind, str) and _RUN_ELSEWHERE.fullmatch(kind):
        report(f"block {kind}", "a block of type %.100r, of a tool that ran elsewhere, is left out of a request", kind)
    elif kind not in _NOT_SHOWN:
        turn.parts += _texts([_shown(block)], path.rpartition("[")[0], unseen)


def _call(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise invalid(f"{path}.input must be an object", f"{path}.input")
    function = {"name": _text(block, "name", path), "arguments": dict(arguments)}
    return {"id": _text(block, "id", path), "type": "function", "function": function}


def _result(block: Mapping[str, Any], path: str) -> TextGenerationRequestMessage:
    content = block.get("content")
    call_id = _text(block, "tool_use_id", path)
    parts: Any = content or ""
    if isinstance(content, list):
        parts = text_content(list(map(_shown, content)), f"{path}.content", _BLOCKS, unseen=True)
    elif not isinstance(parts, str):
        raise invalid(f"{path}.content must be a text or a list of blocks", f"{path}.content")
    if block.get("is_error") is True:
        parts = _failed(parts)
    return TextGenerationRequestMessage(role="tool", content=parts, tool_call_id=call_id)


def _failed(parts: str | list[MessageContent]) -> str | list[MessageContent]:
    """A failed call's result with a text that says so, since no chat template has a field for it."""
    if isinstance(parts, str):
        return f"Error: {parts}".rstrip()
    return [TextContentPart(text="Error:"), *parts]


def _shown(block: Any) -> Any:
    """A block; other forms of text become a block of text."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "tool_reference":
        return {"type": "text", "text": f"[You have the tool {block.get('tool_name')}.]"}
    if kind == "search_result" and isinstance(block.get("content"), list):
        texts = [part.get("text") for part in block["content"] if isinstance(part, Mapping)]
        lines = [f"Title: {block.get('title')}", f"Source: {block.get('source')}", "", *filter(None, texts)]
        return {"type": "text", "text": "\n".join(map(str, lines))}
    return block


def _text(block: Mapping[str, Any], name: str, path: str) -> str:
    found = block.get(name)
    if not isinstance(found, str):
        raise invalid(f"{path}.{name} must be a text", f"{path}.{name}")
    return found


def _texts(given: Any, path: str, unseen: bool = False) -> list[MessageContent]:
    """The texts of a content, and its loaded images. Raises RequestFailed for an empty text."""
    content = text_content(given, path, _BLOCKS, unseen)
    parts: list[MessageContent] = [TextContentPart(text=content)] if isinstance(content, str) else content
    if not parts or any(isinstance(part, TextContentPart) and not part.text for part in parts):
        raise invalid(f"{path} must not be empty, nor any text in it", path)
    return parts
