"""Anthropic's own tools that the client runs (a shell, an editor, a memory, a screen), as functions.

Claude knows their schemas, and so no client sends them; any other model needs them in its prompt. Knows no requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TEXT: dict[str, Any] = {"type": "string"}
_NUMBER: dict[str, Any] = {"type": "integer"}
_RANGE = {"type": "array", "items": _NUMBER, "description": "First and last line, from 1; -1: to the end"}
_PLACE = {"type": "array", "items": _NUMBER, "description": "x and y in pixels"}
_EDITING = {
    "path": _TEXT,
    "file_text": {**_TEXT, "description": "For create: the whole text"},
    "old_str": {**_TEXT, "description": "For str_replace: the text to replace, exactly as it stands, once"},
    "new_str": {**_TEXT, "description": "For str_replace: what comes in its place"},
    "insert_line": {**_NUMBER, "description": "For insert: the line after which the text comes; 0: at the top"},
    "insert_text": {**_TEXT, "description": "For insert: the text"},
    "view_range": _RANGE,
}


def _object(required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split()}


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


_ACTIONS = _commands(
    "screenshot", "key", "type", "mouse_move", "left_click", "right_click", "middle_click", "double_click",
    "triple_click", "left_click_drag", "left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait",
    "cursor_position", "zoom",
)  # fmt: skip

_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Runs a command in a shell that stays open between calls; restart: true opens a new one.",
        _object("", command=_TEXT, restart={"type": "boolean"}),
    ),
    "text_editor": (
        "Views, creates and edits text files, and lists directories.",
        _object("command path", command=_commands("view", "create", "str_replace", "insert", "undo_edit"), **_EDITING),
    ),
    "memory": (
        "Keeps notes in files under /memories, across conversations.",
        _object(
            "command",
            command=_commands("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDITING,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
    "computer": (
        "Uses a screen, a mouse and a keyboard.",
        _object(
            "action",
            action=_ACTIONS,
            coordinate=_PLACE,
            start_coordinate=_PLACE,
            text={**_TEXT, "description": "What to type, or the keys to press"},
            duration={"type": "number", "description": "Seconds"},
            scroll_direction=_commands("up", "down", "left", "right"),
            scroll_amount=_NUMBER,
            region={"type": "array", "items": _NUMBER},
        ),
    ),
}
_KIND = re.compile(r"(bash|text_editor|memory|computer)_\d{8}")
_RUN_BY_SERVERS = re.compile(
    r"(web_search|web_fetch|code_execution|tool_search_tool_(bm25|regex)|advisor)(_\d{8})?|mcp_toolset"
)


def is_run_by_servers(kind: str) -> bool:
    return _RUN_BY_SERVERS.fullmatch(kind) is not None


def as_function(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """The tool in the form of a custom one; None for any other tool."""
    found = _KIND.fullmatch(str(tool.get("type")))
    if found is None:
        return None
    description, schema = _TOOLS[found[1]]
    width = tool.get("display_width_px")
    height = tool.get("display_height_px")
    size = f" The screen has {width} x {height} pixels." if found[1] == "computer" and width and height else ""
    return {"name": tool.get("name", found[1]), "description": description + size, "input_schema": schema}
