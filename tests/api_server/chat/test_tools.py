"""Tools and the choice among them, in every form that clients send."""

from __future__ import annotations

from typing import Any

import pytest

from api_server.chat.thinking import template_options
from api_server.chat.tools import tool_use
from api_server.errors import RequestFailed

A: Any = {"type": "function", "function": {"name": "a", "description": "does a", "parameters": {"type": "object"}}}
B: Any = {"type": "function", "function": {"name": "b", "arguments": {"type": "object"}}}
FLAT: Any = {"type": "function", "name": "c", "parameters": {}, "strict": True}


def names(tools: list[dict[str, Any]] | None) -> list[str]:
    return [tool["function"]["name"] for tool in tools or ()]


@pytest.mark.parametrize(
    ("choice", "shown", "forced"),
    [
        (None, ["a", "b", "c"], None),
        ("auto", ["a", "b", "c"], None),
        ("none", [], None),
        ("required", ["a", "b", "c"], ["a", "b", "c"]),
        ({"type": "auto"}, ["a", "b", "c"], None),
        ({"type": "none"}, [], None),
        ({"type": "required"}, ["a", "b", "c"], ["a", "b", "c"]),
        ({"type": "required", "function": {"name": "a"}}, ["a", "b", "c"], ["a"]),
        ("b", ["a", "b", "c"], ["b"]),
        ({"type": "function", "function": {"name": "b"}}, ["a", "b", "c"], ["b"]),
        ({"function": {"name": "b"}}, ["a", "b", "c"], ["b"]),
        ({"type": "function", "name": "b"}, ["a", "b", "c"], ["b"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]}, ["b"], None),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "c"}}]}},
            ["c"],
            ["c"],
        ),
    ],
)
def test_choices(choice: Any, shown: list[str], forced: list[str] | None) -> None:
    use = tool_use([A, B, FLAT], choice)
    assert (names(use.tools), use.forced) == (shown, forced)


def test_tools_take_the_form_of_templates() -> None:
    tools = tool_use([A, B, FLAT], None).tools
    assert tools is not None
    assert tools[0] == A
    assert tools[1]["function"] == {"name": "b", "parameters": {"type": "object"}}
    assert tools[2] == {"type": "function", "function": {"name": "c", "parameters": {}, "strict": True}}
    assert tool_use([], None).tools is None


@pytest.mark.parametrize(
    ("tools", "choice", "field", "words"),
    [
        (["x"], None, "tools", r"tools\[0\] must be an object"),
        ([{"type": "web_search"}], None, "tools[0].type", "web_search"),
        ([{"type": "function"}], None, "tools", "name"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "tools", "'a b'"),
        ([{"type": "function", "function": {"name": "a", "parameters": 5}}], None, "tools", "parameters must be"),
        ([A, A], None, "tools", "'a' again"),
        ([], "required", "tool_choice", "needs tools"),
        (None, {"function": {"name": "a"}}, "tool_choice", "not among the tools"),
        ([A], "z", "tool_choice", "'z', which is not among the tools"),
        ([A], 5, "tool_choice", "must be none, auto"),
        ([A], {"type": "function"}, "tool_choice", "must be none, auto.*got {'type': 'function'}"),
        ([A], {"type": "sometimes"}, "tool_choice", "must be none, auto.*got {'type': 'sometimes'}"),
        ([A], {"type": "allowed_tools", "tools": []}, "tool_choice", "must be none, auto"),
    ],
)
def test_what_is_wrong_is_named(tools: Any, choice: Any, field: str, words: str) -> None:
    with pytest.raises(RequestFailed, match=words) as refused:
        tool_use(tools, choice)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, {}),
        ({"effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}),
        ({"effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        ({"budget": 0}, {"enable_thinking": False, "thinking": False}),
        ({"budget": 9}, {}),
        ({"enabled": True}, {"enable_thinking": True, "thinking": True}),
    ],
)
def test_wishes_about_reasoning_become_variables(options: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert template_options(None, **options) == wanted
    own = {"enable_thinking": False, "x": 1}
    assert template_options(own, **options) == {**wanted, **own}
