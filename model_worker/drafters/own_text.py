"""The drafter that takes guesses from the sequence itself.

Text often repeats itself or its prompt: code that is changed in places, an answer that quotes, a list whose entries
look alike. A pass over a few tokens of one sequence takes little longer than one over a single token, as both read all
weights. So the tokens that followed the last time are computed along, and kept as far as the model draws the same.
(Prompt lookup decoding: A. Saxena, 2023; in vLLM and SGLang "ngram".) Knows tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from interfaces import Join
from model_worker.drafters.base import Proposal

# Tokens at the end that must have come before in that order. Fewer are often followed by something else.
LEAST_MATCH = 3


class OwnText:
    """Guesses what followed the longest earlier match of the text's end."""

    name = "text"

    def joined(self, join: Join) -> None:
        """Every text is searched anew, so nothing is kept."""

    def left(self, row: int, answer: NDArray[np.int32]) -> None:
        """As `joined`."""

    def rest(self) -> None:
        """Nothing is put off."""

    def propose(self, texts: Mapping[int, NDArray[np.int32]], most: Mapping[int, int]) -> dict[int, Proposal]:
        proposals = {}
        for row, text in texts.items():
            tokens, alike = draft(text, most[row])
            if len(tokens):
                proposals[row] = Proposal(tokens, np.ones(len(tokens)), alike.bit_length())
        return proposals


def draft(tokens: NDArray[np.int32], most: int) -> tuple[NDArray[np.int32], int]:
    """Guess up to `most` tokens that follow `tokens` i32[n]; none, if their end has not come before.

    The guess is what followed the longest earlier match of the end, the last one among equals, and has as many tokens
    as the match, whose length is returned. A match so late that its continuation reaches the end goes round.
    """
    last = len(tokens) - 1
    places = np.flatnonzero(tokens[:last] == tokens[last])
    alike = 1
    longest = max(most, LEAST_MATCH)
    while len(places) and alike < longest:
        further = places[places >= alike]
        further = further[tokens[further - alike] == tokens[last - alike]]
        if not len(further):
            break
        places = further
        alike += 1
    if not len(places) or alike < LEAST_MATCH:
        return tokens[:0], 0
    return np.resize(tokens[places[-1] + 1 :], min(alike, most)), alike
