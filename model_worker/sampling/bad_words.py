"""Sequences of tokens that a row must not write (vLLM's `bad_words`): the last token of one is forbidden where the
others have just been written.

Knows tokens; knows no text and no logits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class BadWords:
    """The bad words of one row; `emitted` are the tokens of its answer so far."""

    def __init__(self, sequences: Sequence[Sequence[int]], emitted: Iterable[int]) -> None:
        self._sequences = [(list(sequence[:-1]), sequence[-1]) for sequence in sequences]
        self._recent = deque(emitted, maxlen=max(len(begin) for begin, _ in self._sequences))

    def add(self, token: int) -> None:
        """Record that the row goes on by this token."""
        self._recent.append(token)

    def forbidden(self) -> list[int]:
        """Return the tokens that may not come next."""
        recent = list(self._recent)
        return [last for begin, last in self._sequences if recent[len(recent) - len(begin) :] == begin]

    @property
    def single(self) -> list[int]:
        """The tokens that may never come."""
        return [last for begin, last in self._sequences if not begin]
