"""Stop strings over text that comes in pieces: a possible beginning of a stop string is held back.

The match that ends first wins, and of those that end together the longest; so the result does not depend on how the
text was cut into pieces. Knows text only.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """State of one answer. With `keep`, the text up to the end of the stop string is part of the answer."""

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._keep = keep
        # Longest end of the text so far that a stop string could begin with.
        self._held = ""
        self.matched: str | None = None

    def add(self, piece: str) -> str:
        """Adds a piece; returns the text that may go out now. Once `matched` is set nothing more may be added."""
        if not self._stops:
            return piece
        held = self._held
        text = self._held + piece
        found = self._first_match(text)
        if found is not None:
            end, self.matched = found
            self._held = ""
            return text[len(held) : end] if self._keep else text[: end - len(self.matched)]
        self._held = self._possible_beginning(text)
        return piece if self._keep else text[: len(text) - len(self._held)]

    def flush(self) -> str:
        """Returns the held-back text when the text ends without a stop string."""
        held = self._held
        self._held = ""
        return "" if self._keep else held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        matches = ((text.find(stop), stop) for stop in self._stops)
        ends = [(start + len(stop), -len(stop), stop) for start, stop in matches if start >= 0]
        if not ends:
            return None
        end, _, stop = min(ends)
        return end, stop

    def _possible_beginning(self, text: str) -> str:
        for length in range(min(len(text), max(map(len, self._stops)) - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops if len(stop) > length):
                return tail
        return ""
