"""Limits that are checked before compilation: sizes and numbers whose cost would have no bound later.

A grammar is enforced step by step, so part of its cost comes while an answer is written, when a refusal is too late.
Knows JSON schemas and patterns as data; knows no compiler.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shared.grammar import GrammarError

# Most characters of a constraint as the client sent it.
MOST_SOURCE = 512 * 1024
# Most characters of one regular expression.
MOST_PATTERN = 64 * 1024
# Most levels of nested objects and lists in a schema.
MOST_LEVELS = 128
# Highest number of repetitions in a pattern.
MOST_REPEATS = 10_000
# The matcher counts remainders: its memory grows with this number.
MOST_MULTIPLE = 10_000
LEAST_MULTIPLE = 1e-6

_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
# Repetitions, and escapes, in which braces mean something else.
_REPEATS = re.compile(r"\\(?:[xuUpP]\{[^}]*\}|.)|\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}", re.DOTALL)


def check_size(source: str, pattern: bool) -> None:
    """Raises GrammarError for a text that is too long to look at."""
    most = MOST_PATTERN if pattern else MOST_SOURCE
    if len(source) > most:
        raise GrammarError(f"it has {len(source)} characters; at most {most} are possible")


def check_pattern(pattern: str) -> None:
    """Raises GrammarError for a regular expression that repeats too often or ends in the middle of an escape."""
    check_size(pattern, pattern=True)
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise GrammarError(f"the pattern ends with a single backslash, at position {len(pattern) - 1}")
    for found in _REPEATS.finditer(pattern):
        if any(number and (len(number) > 9 or int(number) > MOST_REPEATS) for number in found.groups()):
            raise GrammarError(
                f"the repetition {found[0]:.40} at position {found.start()} is above {MOST_REPEATS}, the most possible"
            )


def check_schema(schema: Any) -> None:
    """Raises GrammarError that names the keyword and its place."""
    for path, name, value, levels in _members(schema):
        if levels > MOST_LEVELS:
            raise GrammarError(f"it is nested more than {MOST_LEVELS} levels deep")
        if name == "multipleOf" and isinstance(value, int | float) and not LEAST_MULTIPLE <= value <= MOST_MULTIPLE:
            raise GrammarError(f"{path} must be between {LEAST_MULTIPLE:g} and {MOST_MULTIPLE}, got {value}")
        if name in ("const", "enum") or (name == "properties" and isinstance(value, dict)):
            _check_writable(list(value) if name == "properties" else value, path)
        if name == "pattern" and isinstance(value, str):
            _checked(value, path)
        if name == "patternProperties" and isinstance(value, dict):
            for pattern in value:
                _checked(pattern, path)


def _check_writable(value: Any, path: str) -> None:
    """Raises GrammarError for characters that the matcher would drop: they need an escape that it lacks."""
    for _, key, item, _ in _members(value):
        for text in (key, item):
            found = _UNWRITABLE.search(text) if isinstance(text, str) else None
            if found:
                raise GrammarError(f"{path} has the control character U+{ord(found[0]):04X}, which is never written")


def _checked(pattern: str, path: str) -> None:
    try:
        check_pattern(pattern)
    except GrammarError as error:
        raise GrammarError(f"{path}: {error}") from None


def _members(schema: Any) -> Iterator[tuple[str, str, Any, int]]:
    """Yields (path, last name, value, depth) of all members, without recursion: the depth is unchecked."""
    stack: list[tuple[str, str, Any, int]] = [("", "", schema, 0)]
    while stack:
        path, name, value, levels = stack.pop()
        yield path, name, value, levels
        if levels > MOST_LEVELS:
            continue
        if isinstance(value, Mapping):
            stack += [(f"{path}/{key:.60}", key, item, levels + 1) for key, item in value.items()]
        elif isinstance(value, list):
            stack += [(f"{path}/{i}", "", item, levels + 1) for i, item in enumerate(value)]
