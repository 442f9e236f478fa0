"""Text that comes in pieces, read by generators that need not know where it was cut.

A reader is a generator over one `Scanner`. It yields what it has found, and None where it needs more text. Every
decision depends on the text alone, never on its pieces, so that any split of a text gives the same result. Knows no
format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from interfaces import ParsedToolCallDelta

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of reasoning."""

    text: str


# A piece of an answer, in the order of its text: reasoning, plain text (`content`), or part of a call.
Piece = Thought | ParsedToolCallDelta

Reading = Generator[Piece | None, None, R]


class Malformed(Exception):
    """The text does not match the format; the caller that catches it handles the text that was read."""


class CutOff(Malformed):
    """The text ended within a value or a call."""


class Scanner:
    """The text that is not read yet. `ended`: no more will come. `cut`: something other than the model ended it."""

    __slots__ = ("_recorded", "cut", "dropped", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self.cut = False
        # White space that `passage` has dropped before the last marker.
        self.dropped = ""
        self._recorded: list[str] | None = None

    def take(self, count: int) -> str:
        """Reads `count` characters, which must be there."""
        taken = self.text[:count]
        self.text = self.text[count:]
        if self._recorded is not None:
            self._recorded.append(taken)
        return taken

    def unread(self, text: str) -> None:
        """Puts back the last text read."""
        self.text = text + self.text
        if self._recorded is not None:
            self._recorded.append(self._recorded.pop().removesuffix(text))

    def record(self) -> None:
        """Starts recording what is read, so that `recorded` can return it as plain text."""
        self._recorded = []

    def recorded(self) -> str:
        found = "".join(self._recorded or ())
        self._recorded = None
        return found


def peek(scanner: Scanner, options: Sequence[str]) -> Reading[str | None]:
    """The option that comes next, if any. None may be the beginning of another."""
    while True:
        text = scanner.text
        found = next((option for option in options if text.startswith(option)), None)
        if found is not None or scanner.ended or not any(option.startswith(text) for option in options):
            return found
        yield None


def match(scanner: Scanner, *options: str) -> Reading[str | None]:
    """Like `peek`, and reads the option. The rest of one that was cut off is read, too, and does not match."""
    found = yield from peek(scanner, options)
    if found is not None:
        scanner.take(len(found))
    elif scanner.cut and any(option.startswith(scanner.text) for option in options):
        scanner.take(len(scanner.text))
    return found


def expect(scanner: Scanner, *options: str) -> Reading[str]:
    found = yield from match(scanner, *options)
    if found is None:
        raise _broken_off(scanner)(f"expected one of {options}")
    return found


def space(scanner: Scanner) -> Reading[str]:
    """Reads white space and returns it."""
    found = ""
    while True:
        found += scanner.take(len(scanner.text) - len(scanner.text.lstrip()))
        if scanner.text or scanner.ended:
            return found
        yield None


def passage(
    scanner: Scanner, markers: Sequence[str], piece: Callable[[str], Piece], trim: bool = False
) -> Reading[str | None]:
    """Passes text on up to the first of `markers`, which is read and returned; None when the text ends without one.

    `trim` leaves out the white space before the marker.
    """
    while True:
        found = _first(scanner.text, markers)
        if found is not None:
            at, marker = found
            before = scanner.take(at + len(marker))[:at]
            kept = before.rstrip() if trim else before
            scanner.dropped = before[len(kept) :]
            if kept:
                yield piece(kept)
            return marker
        if scanner.ended:
            if scanner.text:
                yield piece(scanner.take(len(scanner.text)))
            return None
        free = _free(scanner.text, markers, trim)
        if free:
            yield piece(scanner.take(free))
        yield None


def until(scanner: Scanner, markers: Sequence[str], longest: int = 256) -> Reading[tuple[str, str]]:
    """The text up to the first of `markers`, and that marker, both read. Malformed when it is longer, or ends."""
    seen = 0
    while True:
        found = _first(scanner.text, markers, seen)
        if found is not None and found[0] <= longest:
            at, marker = found
            return scanner.take(at + len(marker))[:at], marker
        seen = _free(scanner.text, markers, False)
        if found is not None or seen > longest:
            raise Malformed(f"none of {markers} came")
        if scanner.ended:
            raise CutOff(f"none of {markers} came")
        yield None


def _broken_off(scanner: Scanner) -> type[Malformed]:
    return CutOff if scanner.ended and not scanner.text else Malformed


def _first(text: str, markers: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    found = _any_of(tuple(markers)).search(text, start)
    return (found.start(), found[0]) if found else None


def _free(text: str, markers: Sequence[str], trim: bool) -> int:
    """Length of the text that cannot be part of a marker, nor, with `trim`, of the white space before one."""
    free = len(text)
    for found in _beginning_of(tuple(markers)).finditer(text, max(0, free - max(map(len, markers), default=1) + 1)):
        tail = text[found.start() :]
        if any(len(marker) > len(tail) and marker.startswith(tail) for marker in markers):
            free = found.start()
            break
    return len(text[:free].rstrip()) if trim else free


@lru_cache(maxsize=64)
def _beginning_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of places where one of the markers could begin."""
    return re.compile("|".join(re.escape(marker[0]) for marker in markers))


@lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


class Machine:
    """Runs a reader. Text after the reader's end is plain text."""

    def __init__(self, scanner: Scanner, reading: Reading[None], plain: Callable[[str], Piece]) -> None:
        self._scanner = scanner
        self._reading: Reading[None] | None = reading
        self._plain = plain

    def feed(self, text: str) -> list[Piece]:
        """Adds text; returns the pieces that it decides."""
        if self._reading is None:
            return [self._plain(text)] if text else []
        self._scanner.text += text
        return self._run()

    def finish(self, cut: bool = False) -> list[Piece]:
        """Ends the text; returns the held-back pieces. `cut`: something other than the model ended it."""
        self._scanner.ended = True
        self._scanner.cut = cut
        return self._run() if self._reading is not None else []

    def _run(self) -> list[Piece]:
        found: list[Piece] = []
        for piece in self._reading or ():
            if piece is None:
                return found
            found.append(piece)
        self._reading = None
        rest = self._scanner.take(len(self._scanner.text))
        return [*found, self._plain(rest)] if rest else found
