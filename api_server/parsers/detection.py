"""Detects the formats of a model from its chat template: a template that shows calls shows their marks.

Knows templates as texts; renders none.
"""

from __future__ import annotations

from api_server.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, ToolFormat

# Signs in the order of the search: those of one family come before those that several share.
_TOOL_SIGNS = (
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|constrain|>", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("params_name1=params_value1", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters":', "llama3_json"),
)

_REASONING_SIGNS = (
    ("<|channel|>analysis", "harmony"),
    ("[THINK]", "mistral"),
    ("Here is my thought process", "granite"),
    ("Here's my thought process", "granite"),
    ("<response>", "granite"),
    ("◁think▷", "kimi"),
    ("<think>", "think"),
    ("</think>", "think"),
)


# Families with two forms: a sign, the form that has it, the form that has not.
_ANOTHER = {"deepseek": ("```json", "deepseek_v3", "deepseek_v31"), "mistral": ("[ARGS]", "mistral", "mistral_list")}


def tools_of(template: str) -> ToolFormat:
    """The tool format. A template without signs gives the most common form: an object as the whole answer."""
    name = next((name for sign, name in _TOOL_SIGNS if sign in template), "llama3_json")
    if name in _ANOTHER:
        sign, with_it, without = _ANOTHER[name]
        name = with_it if sign in template else without
    return TOOL_FORMATS[name]


def reasoning_of(template: str) -> ReasoningFormat | None:
    """The reasoning format; None when the template has no reasoning."""
    return next((REASONING_FORMATS[name] for sign, name in _REASONING_SIGNS if sign in template), None)
