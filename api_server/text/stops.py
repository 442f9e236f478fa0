"""Ends an answer by its text: stop strings and patterns. Knows only the text that the client sees."""

from __future__ import annotations

from collections.abc import Sequence

from api_server.text.stop_patterns import StopPatterns
from api_server.text.stop_strings import StopStrings


class Stops:
    """State of one answer. While it is not `active`, before the minimum length, text passes unchecked."""

    def __init__(self, strings: Sequence[str], patterns: Sequence[str], keep: bool) -> None:
        self._strings = StopStrings(strings, keep)
        self._patterns = StopPatterns(patterns)
        self.exist = bool(strings or patterns)
        self.active = True

    @property
    def matched(self) -> str | None:
        """The stop string or pattern that was found; nothing may be added after it."""
        return self._strings.matched if self._strings.matched is not None else self._patterns.matched

    def add(self, piece: str) -> str:
        """Adds a piece; returns the text that may go out now."""
        if not self.exist or not self.active:
            return piece
        text = self._strings.add(piece)
        if self._strings.matched is None:
            self._patterns.add(piece)
        return text

    def flush(self) -> str:
        """Returns the held-back text when the text ends, or when something other than text follows."""
        return "" if self._strings.matched is not None else self._strings.flush()
