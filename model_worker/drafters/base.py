"""What every drafter gives: tokens that may follow a text, each with the drafter's own probability.

A guess is right if it is what is drawn, so a drafter changes no answer. Knows tokens; knows no logits and no passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from interfaces import Join


class Proposal(NamedTuple):
    """Tokens that may follow a text, none of them missing.

    `own[i]` is the probability that the drafter gives to token i if those before it are right. `sureness` is a small
    number for how good the drafter's reasons are: what it is worth is learnt for each.
    """

    tokens: NDArray[np.int32]
    own: NDArray[np.float64]
    sureness: int = 0


class Drafter(Protocol):
    """One way to guess. It keeps nothing that an answer depends on."""

    # The name in metrics and logs.
    name: str

    def joined(self, join: Join) -> None:
        """A sequence has come into a row."""
        ...

    def left(self, row: int, answer: NDArray[np.int32]) -> None:
        """A row's sequence has gone, after this answer."""
        ...

    def propose(self, texts: Mapping[int, NDArray[np.int32]], most: Mapping[int, int]) -> dict[int, Proposal]:
        """Guess up to `most` tokens that follow the text of each row. Rows about which nothing is known are absent."""
        ...

    def rest(self) -> None:
        """Do a little of the work that was put off. Called once a step."""
        ...


class ModelDrafter(Drafter, Protocol):
    """A drafter that runs a model, which takes time. No pass of the worker may be in flight when it is asked."""

    # The most guesses of a row that it gives.
    most: int
