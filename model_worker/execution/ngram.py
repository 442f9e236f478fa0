"""Guesses at what follows in a sequence, taken from the sequence itself: speculation without a draft model.

Text often says again what it, or its prompt, has said before: code that is changed in places, an answer that quotes,
a list whose entries look alike. A pass over a few tokens of one sequence takes little longer than one over a single
token, as both read all weights; so what followed the last time is computed along, and kept as far as the model draws
the same. (Prompt lookup decoding: A. Saxena, 2023; in vLLM and SGLang "ngram".) Knows tokens only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LEAST_MATCH = 3
"""Tokens at the end that must have come before in that order: fewer are often followed by something else."""
_GRAIN = 4
"""Kernels multiply so many tokens at a time: a pass over five takes about as long as one over eight."""


def draft(tokens: NDArray[np.int32], most: int) -> NDArray[np.int32]:
    """Up to `most` tokens that may follow `tokens` i32[n]; none, if their end has not come before.

    Of the places that are like the end, the one that is so for the longest counts, and of such ones the last. As many
    tokens are drafted as were alike. What follows there may run into the end itself: then it goes round.
    """
    last = len(tokens) - 1
    places, alike = np.flatnonzero(tokens[:last] == tokens[last]), 1
    longest = max(most, LEAST_MATCH)
    while len(places) and alike < longest:
        further = places[places >= alike]
        further = further[tokens[further - alike] == tokens[last - alike]]
        if not len(further):
            break
        places, alike = further, alike + 1
    if not len(places) or alike < LEAST_MATCH:
        return tokens[:0]
    count = min(alike, most)
    if count >= _GRAIN:
        count -= (count + 1) % _GRAIN
    return np.resize(tokens[places[-1] + 1 :], count)
