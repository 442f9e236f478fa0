"""Calls as a Python list: `[f(x=1), g(y='a')]`, of Llama 3.2 and 4 and other models trained on that form.

Each argument is passed on as JSON once it is whole.
"""

from __future__ import annotations

import ast
import json
import re
import warnings

import orjson

from api_server.parsers.calls import Calls
from api_server.parsers.json_calls import attempt
from api_server.parsers.scanner import CutOff, Malformed, Reading, Scanner, expect, match, passage, space, until

_START = "<|python_start|>"
_END = "<|python_end|>"
_IDENTIFIER = re.compile(r"[^\W\d][\w.\-]*")
_MATTERS = re.compile(r"""['"()\[\]{},\\]""")


def pythonic(scanner: Scanner, calls: Calls) -> Reading[None]:
    """Reads a list that is the whole answer, or stands after `<|python_start|>`."""
    yield from attempt(scanner, calls, "", _list)
    yield from match(scanner, _END)
    while (yield from passage(scanner, (_START,), calls.content, trim=True)):
        yield from attempt(scanner, calls, _START, _list)
        yield from match(scanner, _END)
        yield from space(scanner)


def _list(scanner: Scanner, calls: Calls) -> Reading[None]:
    yield from space(scanner)
    yield from match(scanner, _START)
    yield from space(scanner)
    yield from expect(scanner, "[")
    while True:
        yield from space(scanner)
        if (yield from match(scanner, "]")):
            break
        yield from match(scanner, ",")
        yield from space(scanner)
        yield from _call(scanner, calls)
    yield from space(scanner)


def _call(scanner: Scanner, calls: Calls) -> Reading[None]:
    text, mark = yield from until(scanner, ("(", "]", ","))
    name = text.strip()
    if mark != "(" or not calls.may_be(name) or _IDENTIFIER.fullmatch(name) is None:
        raise Malformed("no tool has this name")
    yield calls.begin(name)
    opening = "{"
    while True:
        yield from space(scanner)
        if (yield from match(scanner, ")")):
            break
        yield from match(scanner, ",")
        key, _ = yield from until(scanner, ("=",))
        if _IDENTIFIER.fullmatch(key.strip()) is None:
            raise Malformed("no name of an argument")
        text = yield from _value(scanner)
        yield calls.arguments(f"{opening}{json.dumps(key.strip(), ensure_ascii=False)}: {as_json(text)}")
        opening = ", "
    yield calls.arguments("{}" if opening == "{" else "}")
    calls.complete()


def _value(scanner: Scanner) -> Reading[str]:
    """Reads the text of a value, up to the comma or bracket after it, which stays unread."""
    parts: list[str] = []
    depth = 0
    quote = ""
    escaped = False
    while True:
        found = _MATTERS.search(scanner.text, 1 if escaped and scanner.text else 0)
        escaped = escaped and not scanner.text
        parts.append(scanner.take(found.start() if found else len(scanner.text)))
        if found is None:
            if scanner.ended:
                raise CutOff("the text ends within a value")
            yield None
            continue
        mark = found[0]
        if quote:
            escaped = mark == "\\"
            quote = "" if mark == quote else quote
        elif mark in "'\"":
            quote = mark
        elif mark in "([{":
            depth += 1
        elif mark in ")]}," and not depth:
            return "".join(parts)
        elif mark in ")]}":
            depth -= 1
        parts.append(scanner.take(1))


def as_json(text: str) -> str:
    """A literal of Python, or of JSON, as JSON; other text becomes a JSON string."""
    text = text.strip()
    try:
        orjson.loads(text)
        return text
    except orjson.JSONDecodeError:
        pass
    try:
        with warnings.catch_warnings():
            # A model's odd escapes do not belong in this server's log.
            warnings.simplefilter("ignore")
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
