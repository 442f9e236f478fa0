"""Cuts a text into sentences to be spoken one after another: the first is heard before the last is computed.

Knows characters and marks; knows no language and no model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Most characters of a sentence. Models that speak were trained on about so many.
MOST_CHARACTERS = 200
# A piece with fewer characters is spoken with the next one: it may be an abbreviation, and short ones sound odd.
FEWEST_CHARACTERS = 20

# A sentence ends behind such marks, and the quotes and brackets that follow them, or where the line does.
_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s)|[。！？]+[”’」』）]*|\n+")
# Where a sentence that is too long is cut, the best place first.
_PLACES = (re.compile(r"[,;:–—，、；：]\s*"), re.compile(r"\s+"))


def sentences(text: str, most: int = MOST_CHARACTERS) -> list[str]:
    """Cut a text into sentences of at most `most` characters. None of them is empty."""
    whole = [piece for piece in _joined(_ended(text)) if piece]
    return [part for sentence in whole for part in _cut(sentence, most)]


def _ended(text: str) -> Iterator[str]:
    begin = 0
    for found in _END.finditer(text):
        yield text[begin : found.end()]
        begin = found.end()
    yield text[begin:]


def _joined(pieces: Iterator[str]) -> Iterator[str]:
    """Join pieces that are too short with the ones behind them."""
    waiting = ""
    for piece in pieces:
        waiting += piece
        if len(waiting.strip()) >= FEWEST_CHARACTERS:
            yield waiting.strip()
            waiting = ""
    yield waiting.strip()


def _cut(sentence: str, most: int) -> Iterator[str]:
    """Cut a long sentence at the last comma, or else the last space, within each `most` characters."""
    while len(sentence) > most:
        end = _place(sentence[:most])
        yield sentence[:end].strip()
        sentence = sentence[end:].strip()
    if sentence:
        yield sentence


def _place(beginning: str) -> int:
    """Return where a beginning ends best. A cut in its first quarter would leave too little."""
    for pattern in _PLACES:
        ends = [found.end() for found in pattern.finditer(beginning)]
        if ends and ends[-1] > len(beginning) // 4:
            return ends[-1]
    return len(beginning)


def parts_of(text: str, most: int) -> list[str]:
    """Cut a text at the ends of sentences into parts of at most `most` characters."""
    parts: list[str] = []
    for sentence in sentences(text, most):
        if parts and len(parts[-1]) + 1 + len(sentence) <= most:
            parts[-1] += f" {sentence}"
        else:
            parts.append(sentence)
    return parts


class SentenceReader:
    """Cuts a text that comes piece by piece, as `sentences` cuts the whole."""

    def __init__(self, most: int = MOST_CHARACTERS) -> None:
        self._most = most
        self._rest = ""

    def add(self, text: str) -> list[str]:
        """Take the next piece. Returns the sentences that are complete, whatever follows."""
        self._rest += text
        pieces = list(_ended(self._rest))
        if not pieces[-1]:
            # A quote or a bracket may follow the mark at the end.
            pieces.pop()
        complete = []
        waiting = ""
        read = taken = 0
        for piece in pieces[:-1]:
            waiting += piece
            read += len(piece)
            if len(waiting.strip()) >= FEWEST_CHARACTERS:
                complete.append(waiting.strip())
                waiting = ""
                taken = read
        self._rest = self._rest[taken:]
        return [part for sentence in complete for part in _cut(sentence, self._most)]

    def end(self) -> list[str]:
        """Return the last sentences: the text has ended."""
        rest = self._rest
        self._rest = ""
        return sentences(rest, self._most)
