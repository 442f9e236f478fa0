"""The words of a transcript, with their times. Words are found in tokens as transformers finds them for Whisper.

Knows tokens as text. Knows neither windows nor requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# Languages, by their codes, that are written without spaces.
_UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
# Signs that belong to the word behind them, and those that belong to the word before them.
_OPENING = "\"'“¡¿([{-"
_CLOSING = "\"'.。,，!！?？:：”)]}、"
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
# What a decoder writes for a part of a character.
_PART = "�"

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Word:
    """A word of a transcript, and its times in seconds."""

    text: str
    start: float
    end: float


@dataclass
class _Piece:
    """A text of a transcript, and the indices of its tokens."""

    text: str
    indices: list[int] = field(default_factory=list)

    def __add__(self, other: _Piece) -> _Piece:
        return _Piece(self.text + other.text, self.indices + other.indices)


def words_of(
    tokens: Sequence[int], times: Sequence[tuple[float, float]], language: str | None, decode: Decode
) -> list[Word]:
    """The words of tokens that are text, each of which has the times of its start and its end."""
    pieces = _characters(tokens, decode)
    if language not in _UNSPACED:
        pieces = _spaced(pieces)
    found = []
    for piece in _with_signs(pieces):
        if text := piece.text.strip():
            found.append(Word(text, times[piece.indices[0]][0], times[piece.indices[-1]][1]))
    return found


def _characters(tokens: Sequence[int], decode: Decode) -> list[_Piece]:
    """The shortest runs of tokens that are whole characters."""
    whole = decode(tokens)
    pieces = []
    first = 0
    length = 0
    for index in range(len(tokens)):
        text = decode(tokens[first : index + 1])
        broken = text.find(_PART)
        place = length + broken
        # A sign for a broken character that stands in the whole text is no unfinished one.
        if broken < 0 or place >= len(whole) or whole[place] == _PART:
            pieces.append(_Piece(text, list(range(first, index + 1))))
            first = index + 1
            length += len(text)
    return pieces


def _spaced(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Pieces that begin with a space, or are punctuation, begin a word; others go on with it."""
    words: list[_Piece] = []
    for piece in pieces:
        begins = piece.text.startswith(" ") or piece.text.strip() in _PUNCTUATION
        if begins or not words:
            words.append(piece)
        else:
            words[-1] += piece
    return words


def _with_signs(pieces: Sequence[_Piece]) -> list[_Piece]:
    """The words with the signs that belong to them."""
    behind: list[_Piece] = []
    for piece in reversed(pieces):
        if behind and piece.text.startswith(" ") and piece.text.strip() in _OPENING:
            behind[-1] = piece + behind[-1]
        else:
            behind.append(piece)
    words: list[_Piece] = []
    for piece in reversed(behind):
        if words and not words[-1].text.endswith(" ") and piece.text in _CLOSING:
            words[-1] += piece
        else:
            words.append(piece)
    return words
