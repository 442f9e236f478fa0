"""Writers of every format, independent of the readers, and random calls for them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

Calls = Sequence[tuple[str, dict[str, Any]]]

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
    },
    "search.web": {"type": "object", "properties": {"query": {"type": "string"}, "deep": {"type": "boolean"}}},
    "stop-all": {"type": "object", "properties": {}},
}
MARKS = [
    "<tool_call>", "</tool_call>", "<|tool_call|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<function=", "<parameter=", "</parameter>",
    "</function>",
    "<|start|>", "assistant", "<|channel|>", "analysis", "commentary to=functions.f", "final", "<|message|>",
    "<|end|>", "<|call|>", "<|return|>", "<think>", "</think>", "[THINK]", "[/THINK]", "Here is my thought process:",
    "Here is my response:", "◁think▷", "◁/think▷", "<response>", "<|python_start|>", "<|python_end|>",
]  # fmt: skip
SCRAPS = [
    *MARKS, '{"name": "get_weather", "arguments": {"city": "x"}}', '{"name": ', '"f"', '"arguments": ', "{", "}", "[",
    "]",
    "(", ")", ", ", ": ", "=", '"', "'", "\\", "\n", " ", "null", "1", "get_weather", "functions.f:0", "```json", "é😀",
    "get_weather(city='x')", "<", "|", ">", "t",
]  # fmt: skip

_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\"'\\{}[]<>,:= "), max_size=12)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6).map(lambda x: round(x, 3)) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)
_OF_TYPE = {
    "string": _TEXT.filter(lambda text: "</" not in text),
    "integer": st.integers(-(10**6), 10**6),
    "boolean": st.booleans(),
    "object": st.dictionaries(_TEXT.filter(lambda text: "</" not in text), st.integers(), max_size=2),
}


@st.composite
def calls(draw: st.DrawFn) -> list[tuple[str, dict[str, Any]]]:
    """Calls of the tools of `SCHEMAS`, each with some of their arguments."""
    found = []
    for name in draw(st.lists(st.sampled_from(sorted(SCHEMAS)), min_size=1, max_size=3)):
        properties = SCHEMAS[name]["properties"]
        chosen = [key for key in properties if draw(st.booleans())]
        found.append((name, {key: draw(_OF_TYPE[properties[key]["type"]]) for key in chosen}))
    return found


any_json = _VALUES


def cut(text: str, rng: random.Random) -> list[str]:
    """The text in random pieces."""
    places = sorted(rng.sample(range(len(text) + 1), rng.randrange(len(text) + 1)))
    ends = [*places, len(text)]
    return [text[start:end] for start, end in zip([0, *places], ends, strict=True)]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: Calls) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {_json(a)}}}\n</tool_call>' for n, a in calls)


def _granite(calls: Calls) -> str:
    return "<|tool_call|>" + _json([{"name": name, "arguments": arguments} for name, arguments in calls])


def _llama(calls: Calls) -> str:
    return "; ".join(_json({"name": name, "parameters": arguments}) for name, arguments in calls)


def _pythonic(calls: Calls) -> str:
    return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls) + "]"


def _mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _mistral_list(calls: Calls) -> str:
    return "[TOOL_CALLS] " + _json([{"arguments": arguments, "name": name} for name, arguments in calls])


def _deepseek_v3(calls: Calls) -> str:
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{_json(a)}\n```<｜tool▁call▁end｜>" for n, a in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Calls) -> str:
    each = (f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{_json(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def _kimi(calls: Calls) -> str:
    each = (
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{_json(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return "<|tool_calls_section_begin|>" + "".join(each) + "<|tool_calls_section_end|>"


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _glm(calls: Calls) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{_spelled(v)}</arg_value>\n" for k, v in arguments.items())
        return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _qwen_coder(calls: Calls) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        pairs = (f"<parameter={k}>\n{_spelled(v)}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _harmony(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{_json(a)}<|call|>" for n, a in calls
    )


def _bare(calls: Calls) -> str:
    return _json([{"name": name, "parameters": arguments} for name, arguments in calls])


WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": _hermes,
    "granite": _granite,
    "llama3_json": _llama,
    "pythonic": _pythonic,
    "mistral": _mistral,
    "mistral_list": _mistral_list,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "kimi_k2": _kimi,
    "glm45": _glm,
    "qwen3_coder": _qwen_coder,
    "harmony": _harmony,
    "json": _bare,
}
TEXT_BEFORE = {
    "hermes", "granite", "mistral", "mistral_list", "deepseek_v3", "deepseek_v31", "kimi_k2", "glm45", "qwen3_coder",
}  # fmt: skip
"""Formats whose calls may follow a text; in the others they are the whole answer."""
