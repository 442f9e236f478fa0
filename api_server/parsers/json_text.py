"""JSON within text that comes in pieces: finds where a value ends, and passes it on as it comes.

Matches brackets and strings and checks nothing else: the model's text is passed on unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import orjson

from api_server.parsers.calls import Calls
from api_server.parsers.scanner import CutOff, Malformed, Piece, Reading, Scanner, expect, match, peek, space

# Characters that matter outside of strings: a string's beginning, brackets, and characters that JSON never has there.
_OUTSIDE = re.compile(r'["{}\[\]]|[^\s:,\w+\-.]')
_INSIDE = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[^\w+\-.]")

_NAMES = ("name",)
_ARGUMENTS = ("arguments", "parameters")
_KEYS = (*_NAMES, *_ARGUMENTS, "type", "id")


class _Extent:
    """Finds the end of a value."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._begun = False

    def feed(self, text: str) -> int | None:
        """The index after the value's end, or of a character that breaks it off; None when it goes on."""
        at = 0
        if not self._begun and text:
            self._begun = True
            if text[0] not in '"{[':
                self._depth = -1
        if self._depth < 0:
            found = _SCALAR_END.search(text)
            return found.start() if found else None
        if self._escaped and text:
            self._escaped = False
            at = 1
        while at < len(text):
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return None
            at = found.end()
            end = self._step(found[0])
            if end is not None:
                return found.end() if end else found.start()
            if self._escaped:
                if at == len(text):
                    return None
                self._escaped = False
                at = at + 1
        return None

    def _step(self, character: str) -> bool | None:
        """None: the value goes on. True: it ends after this character; False: before it, unfinished."""
        if self._in_string:
            self._escaped = character == "\\"
            self._in_string = self._escaped
            return True if not self._in_string and not self._depth else None
        if character == '"':
            self._in_string = True
            return None
        if character in "{[":
            self._depth += 1
            return None
        if character in "}]":
            self._depth -= 1
            return True if not self._depth else None
        return False


def value(scanner: Scanner, piece: Callable[[str], Piece] | None = None) -> Reading[str]:
    """Reads one value and returns its text; with `piece`, passes it on as it comes, too.

    Malformed when there is none, when it breaks off, or when the text ends within it.
    """
    extent = _Extent()
    parts = []
    while True:
        end = extent.feed(scanner.text)
        part = scanner.take(len(scanner.text) if end is None else end)
        if part:
            parts.append(part)
            if piece is not None:
                yield piece(part)
        if end is not None or scanner.ended:
            break
        yield None
    text = "".join(parts)
    if (end is None and (not text or text[0] in '"{[')) or not text or not _is_closed(text):
        raise (CutOff if end is None else Malformed)("a JSON value is missing or unfinished")
    return text


def call_object(scanner: Scanner, calls: Calls, certain: bool = True) -> Reading[None]:
    """Reads one call: an object with its name and arguments, in either order; other keys are skipped.

    When it is not `certain` that this is a call at all, nothing is passed on before a known name and arguments are
    there. Malformed when it is no such object.
    """
    name = ""
    pending = None
    begun = False
    has_arguments = False
    yield from expect(scanner, "{")
    while True:
        yield from space(scanner)
        if (yield from match(scanner, "}")):
            break
        yield from match(scanner, ",")
        yield from space(scanner)
        key = _text((yield from value(scanner)))
        if not (certain or key in _KEYS):
            raise Malformed("an object that is no call")
        yield from space(scanner)
        yield from expect(scanner, ":")
        yield from space(scanner)
        if key in _NAMES and not name:
            name = _text((yield from value(scanner)))
            if not name.strip() or not (certain or calls.may_be(name)):
                raise Malformed("no tool has this name")
        elif key in _ARGUMENTS and not has_arguments and pending is None:
            if not name:
                pending = as_arguments((yield from value(scanner)))
                continue
            if not begun:
                begun = True
                yield calls.begin(name)
            has_arguments = True
            yield from arguments(scanner, calls)
            continue
        else:
            yield from value(scanner)
            continue
        if certain or pending is not None:
            begun = True
            yield calls.begin(name)
        if pending is not None:
            has_arguments = True
            yield calls.arguments(pending)
    if not begun:
        raise Malformed("an object without the name of a tool")
    if not has_arguments:
        yield calls.arguments("{}")
    calls.complete()


def arguments(scanner: Scanner, calls: Calls) -> Reading[None]:
    """Reads the last call's arguments: an object as it comes; another value whole, as an object if possible."""
    if (yield from peek(scanner, ("{",))):
        yield from value(scanner, calls.arguments)
    else:
        yield calls.arguments(as_arguments((yield from value(scanner))))


def as_arguments(text: str) -> str:
    """The text of arguments from a JSON value: null gives no argument, and a text may hold an object."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    if found is None or found == "":
        return "{}"
    if isinstance(found, str):
        try:
            return found if isinstance(orjson.loads(found), dict) else text
        except orjson.JSONDecodeError:
            return text
    return text


def _text(literal: str) -> str:
    try:
        found = orjson.loads(literal)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, str):
        raise Malformed(f"{literal!r} is no text")
    return found


def _is_closed(text: str) -> bool:
    first = text[0]
    last = text[-1]
    if first == '"':
        return len(text) > 1 and last == '"'
    return last == {"{": "}", "[": "]"}.get(first, last)
