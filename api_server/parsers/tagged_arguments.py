"""Calls whose arguments are tagged one by one, and are not JSON: GLM 4.5 and Qwen3-Coder.

A parameter with a text schema is passed on as it comes; any other is JSON if it reads as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from api_server.parsers.calls import Calls, is_name, schema_of
from api_server.parsers.json_calls import attempt
from api_server.parsers.scanner import CutOff, Malformed, Reading, Scanner, expect, match, passage, space, until

_LONGEST_VALUE = 1 << 24


@dataclass(frozen=True)
class Tags:
    """Tags of a format. `end_name` and `end_key` close what stands before them; `before_value` opens a tagged value.

    `end_value` are the forms of its end, the longest first.
    """

    open: str
    before_name: str
    end_name: Sequence[str]
    key: str
    end_key: str
    before_value: str
    start_of_value: str
    end_value: Sequence[str]
    close: Sequence[str]


GLM = Tags(
    open="<tool_call>",
    before_name="",
    end_name=("\n", "<arg_key>", "</tool_call>"),
    key="<arg_key>",
    end_key="</arg_key>",
    before_value="<arg_value>",
    start_of_value="",
    end_value=("</arg_value>",),
    close=("</tool_call>",),
)
QWEN_CODER = Tags(
    open="<tool_call>",
    before_name="<function=",
    end_name=(">",),
    key="<parameter=",
    end_key=">",
    before_value="",
    start_of_value="\n",
    end_value=("\n</parameter>", "</parameter>"),
    close=("</function>", "</tool_call>"),
)


def glm(scanner: Scanner, calls: Calls) -> Reading[None]:
    """Reads `<tool_call>NAME` and pairs of `<arg_key>` and `<arg_value>`."""
    return _read(scanner, calls, GLM)


def qwen_coder(scanner: Scanner, calls: Calls) -> Reading[None]:
    """Reads `<tool_call><function=NAME>` and `<parameter=KEY>` for each argument."""
    return _read(scanner, calls, QWEN_CODER)


def _read(scanner: Scanner, calls: Calls, tags: Tags) -> Reading[None]:
    while (yield from passage(scanner, (tags.open,), calls.content, trim=True)):
        if (yield from attempt(scanner, calls, tags.open, lambda s, c: _call(s, c, tags))):
            yield from space(scanner)


def _call(scanner: Scanner, calls: Calls, tags: Tags) -> Reading[None]:
    yield from space(scanner)
    if tags.before_name:
        yield from expect(scanner, tags.before_name)
    text, mark = yield from until(scanner, tags.end_name)
    name = text.strip()
    if not is_name(name):
        raise Malformed("no name of a tool")
    if mark in (tags.key, *tags.close):
        scanner.unread(mark)
    yield calls.begin(name)
    count = 0
    while True:
        yield from space(scanner)
        if not (yield from match(scanner, tags.key)):
            break
        yield from _argument(scanner, calls, name, tags, count)
        count += 1
    yield calls.arguments("}" if count else "{}")
    calls.complete()
    for end in tags.close:
        yield from match(scanner, end)
        yield from space(scanner)


def _argument(scanner: Scanner, calls: Calls, tool: str, tags: Tags, number: int) -> Reading[None]:
    key, _ = yield from until(scanner, (tags.end_key,))
    yield from space(scanner) if tags.before_value else match(scanner, tags.start_of_value)
    if tags.before_value:
        yield from expect(scanner, tags.before_value)
    yield calls.arguments(("{" if not number else ", ") + _literal(key.strip()) + ": ")
    if schema_of(calls.tools.get(tool), key.strip()).get("type") == "string":
        yield calls.arguments('"')
        end = yield from passage(scanner, tags.end_value, lambda part: calls.arguments(_literal(part)[1:-1]))
        if end is None:
            raise CutOff("the text ends within an argument")
        yield calls.arguments('"')
    else:
        text, _ = yield from until(scanner, tags.end_value, _LONGEST_VALUE)
        yield calls.arguments(_as_json(text))


def _as_json(text: str) -> str:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return _literal(text)
    return text.strip()


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
