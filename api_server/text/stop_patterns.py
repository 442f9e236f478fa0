"""Stop patterns (`stop_regex`) over text that comes token by token; the match stays in the text, as upstream.

The engine is RE2, whose time is linear in the text whatever the pattern: Python's `re` backtracks, and one short
pattern of a stranger could hold the process for hours. Its word boundaries and classes are those of ASCII, and `$`
is the end of the text only. Knows text only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import re2

MOST_PATTERNS = 32
MOST_BYTES = 256

# A match is searched in this many characters before the end of the text, so that each token costs the same.
WINDOW = 1024

# Most instructions of a request's patterns together: the steps for each character of the window in the worst text.
MOST_INSTRUCTIONS = 4096

# Bytes for one pattern's program; compiling stops there.
_MEMORY = 1 << 17


def pattern_problem(patterns: Sequence[str]) -> str | None:
    """The reason why these patterns cannot be used, or None."""
    if len(patterns) > MOST_PATTERNS:
        return f"at most {MOST_PATTERNS} stop_regex patterns are allowed, got {len(patterns)}."
    if "" in patterns:
        return "stop_regex must not contain an empty pattern, which would end every answer before it starts."
    size = max((len(pattern.encode()) for pattern in patterns), default=0)
    if size > MOST_BYTES:
        return f"a stop_regex pattern is over the {MOST_BYTES}-byte limit, got {size} bytes."
    try:
        compiled(patterns)
    except ValueError as error:
        return f"{error}."
    return None


def compiled(patterns: Sequence[str]) -> list[Any]:
    """The patterns as RE2 programs. ValueError names the pattern that is not valid, and the reason."""
    if not patterns:
        return []
    options: Any = re2.Options()
    options.log_errors = False
    options.max_mem = _MEMORY
    programs: list[Any] = []
    size = 0
    for pattern in patterns:
        try:
            programs.append(re2.compile(pattern, options))
        except re2.error as error:
            reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
            raise ValueError(f"invalid stop_regex {pattern!r}: {reason} (the syntax is RE2's)") from None
        size += programs[-1].programsize
        if size > MOST_INSTRUCTIONS:
            raise ValueError(
                f"invalid stop_regex {pattern!r}: too complex, with {size} instructions up to here where "
                f"{MOST_INSTRUCTIONS} are possible; use smaller repetition counts or fewer patterns"
            )
    return programs


class StopPatterns:
    """State of one answer. `matched` is the first pattern, in the order given, that was found."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = list(patterns)
        self._programs = compiled(patterns)
        self._tail = ""
        # 1 once the tail has lost its beginning, so that `^` does not match there.
        self._start = 0
        self.matched: str | None = None

    def add(self, piece: str) -> None:
        """Adds one token's text and searches it. One search per token: the chunks of arrival change nothing."""
        if not self._programs or not piece:
            return
        self._tail += piece
        if len(self._tail) > WINDOW + 1:
            self._tail = self._tail[-WINDOW - 1 :]
            self._start = 1
        found = (p for p, program in zip(self._patterns, self._programs, strict=True) if self._in_tail(program))
        self.matched = next(found, None)

    def _in_tail(self, program: Any) -> bool:
        return program.search(self._tail, self._start) is not None
