"""Calls as JSON objects with `name` and `arguments`: Hermes and Qwen, Granite, Llama 3, Mistral, and bare JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from api_server.parsers.calls import Calls, is_name
from api_server.parsers.json_text import arguments, call_object
from api_server.parsers.scanner import CutOff, Malformed, Reading, Scanner, match, passage, peek, space, until

Reader = Callable[[Scanner, Calls], Reading[None]]


def attempt(scanner: Scanner, calls: Calls, marker: str, read: Reader) -> Reading[bool]:
    """Reads calls after a marker. Text that is no call goes on as plain text, the marker included.

    A call that has begun and breaks off stays as it is. A call that was cut off before its name is dropped: no client
    could use it, and its marks are no text.
    """
    begun = calls.begun
    scanner.record()
    try:
        yield from read(scanner, calls)
    except Malformed as error:
        if isinstance(error, CutOff) and scanner.cut and (marker or calls.forced):
            scanner.take(len(scanner.text))
            scanner.recorded()
            return False
        text = (scanner.dropped + marker if marker else "") + scanner.recorded()
        if calls.begun == begun:
            if text:
                yield calls.content(text)
            return False
    scanner.recorded()
    return True


def marked(markers: Sequence[str], ends: Sequence[str]) -> Reader:
    """Makes a reader of an object, or a list of them, after a marker: `<tool_call>{...}</tool_call>`.

    The end marker may be missing.
    """

    def read(scanner: Scanner, calls: Calls) -> Reading[None]:
        while True:
            marker = yield from passage(scanner, markers, calls.content, trim=True)
            if marker is None:
                return
            if (yield from attempt(scanner, calls, marker, _object_or_list)):
                yield from space(scanner)
                yield from match(scanner, *ends)
                yield from space(scanner)

    return read


hermes = marked(("<tool_call>",), ("</tool_call>",))
granite = marked(("<|tool_call|>", "<tool_call>", "<function_call>"), ("</tool_call>", "</function_call>"))


def llama3_json(scanner: Scanner, calls: Calls) -> Reading[None]:
    """Reads objects separated by semicolons, after `<|python_tag|>` or as the whole answer."""
    yield from attempt(scanner, calls, "", _bare_objects)
    while (yield from passage(scanner, (_PYTHON_TAG,), calls.content, trim=True)):
        yield from attempt(scanner, calls, _PYTHON_TAG, _objects)


def bare_json(scanner: Scanner, calls: Calls) -> Reading[None]:
    """Reads an answer that is a list of objects, or one object."""
    yield from attempt(scanner, calls, "", _object_or_list)
    yield from space(scanner)


def mistral(scanner: Scanner, calls: Calls) -> Reading[None]:
    """Reads `[TOOL_CALLS]` before a list of objects, or before each `name[ARGS]{...}`."""
    while (yield from passage(scanner, (_TOOL_CALLS,), calls.content, trim=True)):
        if (yield from attempt(scanner, calls, _TOOL_CALLS, _mistral_calls)):
            yield from space(scanner)


_PYTHON_TAG = "<|python_tag|>"
_TOOL_CALLS = "[TOOL_CALLS]"
_CALL_ID = "[CALL_ID]"
_ARGS = "[ARGS]"


def _object_or_list(scanner: Scanner, calls: Calls) -> Reading[None]:
    yield from space(scanner)
    if (yield from match(scanner, "[")):
        yield from _list(scanner, calls)
    else:
        yield from call_object(scanner, calls)


def _list(scanner: Scanner, calls: Calls) -> Reading[None]:
    while True:
        yield from space(scanner)
        if (yield from match(scanner, "]")):
            return
        yield from match(scanner, ",")
        yield from space(scanner)
        yield from call_object(scanner, calls)


def _bare_objects(scanner: Scanner, calls: Calls) -> Reading[None]:
    """Reads objects at the beginning of an answer; one is a call only if it names a known tool."""
    yield from space(scanner)
    yield from match(scanner, _PYTHON_TAG)
    yield from call_object(scanner, calls, certain=False)
    yield from _more_objects(scanner, calls)


def _objects(scanner: Scanner, calls: Calls) -> Reading[None]:
    yield from space(scanner)
    yield from call_object(scanner, calls)
    yield from _more_objects(scanner, calls)


def _more_objects(scanner: Scanner, calls: Calls) -> Reading[None]:
    while True:
        yield from space(scanner)
        if (yield from match(scanner, ";")):
            yield from space(scanner)
        if not (yield from peek(scanner, ("{",))):
            return
        yield from call_object(scanner, calls)


def _mistral_calls(scanner: Scanner, calls: Calls) -> Reading[None]:
    yield from space(scanner)
    if (yield from match(scanner, "[")):
        yield from _list(scanner, calls)
        return
    text, mark = yield from until(scanner, (_ARGS, _CALL_ID, "{"))
    name = text.strip()
    call_id = None
    if not is_name(name):
        raise Malformed("no name of a tool")
    if mark == _CALL_ID:
        call_id, mark = yield from until(scanner, (_ARGS, "{"))
    if mark == "{":
        scanner.unread(mark)
    yield calls.begin(name, call_id)
    yield from space(scanner)
    yield from arguments(scanner, calls)
    calls.complete()
