"""Calls between special tokens that also enclose the whole section: DeepSeek and Kimi."""

from __future__ import annotations

from api_server.parsers.calls import Calls, is_name
from api_server.parsers.json_calls import attempt
from api_server.parsers.json_text import arguments
from api_server.parsers.scanner import Malformed, Reading, Scanner, match, passage, peek, space, until

DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_FENCE = "```"
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
_SECTION, _CALL, _SEP, _CALL_END, _SECTION_END = DEEPSEEK
_KIMI_SECTION, _KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_CALL_END, _KIMI_SECTION_END = KIMI


def deepseek(scanner: Scanner, calls: Calls) -> Reading[None]:
    """Reads DeepSeek's calls.

    V3 and R1: kind, separator, name and fenced arguments. V3.1: name, separator, arguments.
    """
    while True:
        marker = yield from passage(scanner, (_SECTION, _CALL, _SECTION_END), calls.content, trim=True)
        if marker is None:
            return
        if marker != _CALL or (yield from attempt(scanner, calls, marker, _deepseek_call)):
            yield from space(scanner)


def kimi(scanner: Scanner, calls: Calls) -> Reading[None]:
    """Reads Kimi's calls. The model writes the id, `functions.NAME:NUMBER`, and expects it in the conversation."""
    while True:
        marker = yield from passage(scanner, (_KIMI_SECTION, _KIMI_CALL, _KIMI_SECTION_END), calls.content, trim=True)
        if marker is None:
            return
        if marker != _KIMI_CALL or (yield from attempt(scanner, calls, marker, _kimi_call)):
            yield from space(scanner)


def _deepseek_call(scanner: Scanner, calls: Calls) -> Reading[None]:
    first, _ = yield from until(scanner, (_SEP,))
    yield from space(scanner)
    fenced = not (yield from peek(scanner, ("{",)))
    name = first
    if fenced:
        name, _ = yield from until(scanner, ("\n", _FENCE))
        yield from space(scanner)
        yield from match(scanner, _FENCE)
        yield from match(scanner, "json")
        yield from space(scanner)
    yield from _call(scanner, calls, name.strip(), None)
    if fenced:
        yield from match(scanner, _FENCE)
        yield from space(scanner)
    yield from match(scanner, _CALL_END)


def _kimi_call(scanner: Scanner, calls: Calls) -> Reading[None]:
    text, _ = yield from until(scanner, (_KIMI_ARGUMENTS,))
    call_id = text.strip()
    name = call_id.rpartition(":")[0] or call_id
    yield from space(scanner)
    yield from _call(scanner, calls, name.removeprefix("functions."), call_id)
    yield from match(scanner, _KIMI_CALL_END)


def _call(scanner: Scanner, calls: Calls, name: str, call_id: str | None) -> Reading[None]:
    if not is_name(name):
        raise Malformed("no name of a tool")
    yield calls.begin(name, call_id)
    yield from arguments(scanner, calls)
    calls.complete()
    yield from space(scanner)
