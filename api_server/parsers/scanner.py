"""Text that comes in pieces, read by generators that need not know where it was cut.

A reader is a generator over one `Scanner`. It yields what it has found, and None where it cannot go on before more text
comes; every decision depends on the text alone, never on its pieces, so that any split of a text gives the same result.
Knows no format.
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


Piece = Thought | ParsedToolCallDelta
"""Of an answer, in the order in which it was written: reasoning, plain text (`content`), or part of a call."""

Reading = Generator[Piece | None, None, R]


class Malformed(Exception):
    """The text is not what the format says; whoever catches it decides what becomes of what was read."""


class CutOff(Malformed):
    """The text ended within it."""


class Scanner:
    """The text that is not read yet. `ended`: no more will come. `cut`: it was not the model that ended it."""

    __slots__ = ("_recorded", "cut", "dropped", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self.cut = False
        self.dropped = ""
        """White space that `passage` has left out before the last marker."""
        self._recorded: list[str] | None = None

    def take(self, count: int) -> str:
        """Reads so many characters, which must be there."""
        taken, self.text = self.text[:count], self.text[count:]
        if self._recorded is not None:
            self._recorded.append(taken)
        return taken

    def unread(self, text: str) -> None:
        """Puts back what was read last."""
        self.text = text + self.text
        if self._recorded is not None:
            self._recorded.append(self._recorded.pop().removesuffix(text))

    def record(self) -> None:
        """From here on `recorded` tells what has been read, so that it can be given back as plain text."""
        self._recorded = []

    def recorded(self) -> str:
        found, self._recorded = "".join(self._recorded or ()), None
        return found


def peek(scanner: Scanner, options: Sequence[str]) -> Reading[str | None]:
    """Which of the options comes next, if any. None may be the beginning of another."""
    while True:
        text = scanner.text
        found = next((option for option in options if text.startswith(option)), None)
        if found is not None or scanner.ended or not any(option.startswith(text) for option in options):
            return found
        yield None


def match(scanner: Scanner, *options: str) -> Reading[str | None]:
    """As `peek`, and reads it. What a cut has left of one is read, too, and is none."""
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
    """How much of the text can be part of no marker, and with `trim` of no white space before one."""
    free = len(text)
    for found in _beginning_of(tuple(markers)).finditer(text, max(0, free - max(map(len, markers), default=1) + 1)):
        tail = text[found.start() :]
        if any(len(marker) > len(tail) and marker.startswith(tail) for marker in markers):
            free = found.start()
            break
    return len(text[:free].rstrip()) if trim else free


@lru_cache(maxsize=64)
def _beginning_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Where one of the markers could begin."""
    return re.compile("|".join(re.escape(marker[0]) for marker in markers))


@lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


class Machine:
    """A reader at work. What its text goes on with after its end is plain text."""

    def __init__(self, scanner: Scanner, reading: Reading[None], plain: Callable[[str], Piece]) -> None:
        self._scanner = scanner
        self._reading: Reading[None] | None = reading
        self._plain = plain

    def feed(self, text: str) -> list[Piece]:
        """The next text, and what it decides."""
        if self._reading is None:
            return [self._plain(text)] if text else []
        self._scanner.text += text
        return self._run()

    def finish(self, cut: bool = False) -> list[Piece]:
        """The text has ended: what was held back. `cut`: it was not the model that ended it."""
        self._scanner.ended, self._scanner.cut = True, cut
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
