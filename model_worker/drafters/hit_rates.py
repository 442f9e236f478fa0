"""How often guesses are right, by drafter, by how sure it was, by depth, and by row.

Knows counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from model_worker.drafters.base import Proposal

# Guesses after which older ones count half.
_REMEMBERED = 64.0
# The belief before anything is known, and the number of guesses that it counts as.
_BELIEVED = 0.7
_BELIEF = 4.0
# The same of a row, whose guesses are believed to be as good as all others; and the guesses that it remembers.
_ROW_BELIEF = 4.0
_ROW_REMEMBERED = 24.0
# No guess is believed to be surer.
_MOST = 0.98


def depth_class(guesses: int) -> NDArray[np.int64]:
    """Return a class of each guess: 0 of the first, 1 of the second, 2 of the two next ones, 3 of four, and so on."""
    classes: NDArray[np.int64] = np.ceil(np.log2(np.arange(1, guesses + 1))).astype(np.int64)
    return classes


class HitRates:
    """Rates are relative to the drafter's own probabilities, which may be too high or too low."""

    def __init__(self) -> None:
        # By drafter and sureness: right guesses, and those expected, by class of depth.
        self._cells: dict[tuple[str, int], NDArray[np.float64]] = {}
        # By row: right guesses, and those expected by the rates.
        self._rows: dict[int, tuple[float, float]] = {}

    def forget_row(self, row: int) -> None:
        self._rows.pop(row, None)

    def each(self, name: str, proposal: Proposal) -> NDArray[np.float64]:
        """Return the probability of each guess, if those before it are right, as all rows have it."""
        classes = depth_class(len(proposal.tokens))
        right, expected = self._cell(name, proposal.sureness)[:, classes]
        learnt = (right + _BELIEVED * _BELIEF) / (expected + _BELIEF)
        rates = np.minimum(proposal.own * learnt, _MOST)
        return np.asarray(rates, np.float64)

    def reach(self, row: int, name: str, proposal: Proposal) -> NDArray[np.float64]:
        """Return the probability that a row comes as far as each guess."""
        right, expected = self._rows.get(row, (0.0, 0.0))
        trust = min(1.1, (right + _ROW_BELIEF) / (expected + _ROW_BELIEF))
        return np.asarray(np.cumprod(np.minimum(self.each(name, proposal) * trust, _MOST)), np.float64)

    def learn(self, row: int, name: str, proposal: Proposal, tried: int, right: int) -> None:
        """So many guesses of a proposal were computed for a row, and the first `right` of them were right.

        What came after a wrong one says nothing.
        """
        seen = min(tried, right + 1)
        if not seen:
            return
        part = Proposal(proposal.tokens[:seen], proposal.own[:seen], proposal.sureness)
        hits = np.arange(seen) < right
        known_right, known_expected = self._rows.get(row, (0.0, 0.0))
        known_right += float(hits.sum())
        known_expected += float(self.each(name, part).sum())
        half = 0.5 if known_expected > _ROW_REMEMBERED else 1.0
        self._rows[row] = known_right * half, known_expected * half
        cell = self._cell(name, proposal.sureness)
        classes = depth_class(seen)
        np.add.at(cell[0], classes, hits)
        np.add.at(cell[1], classes, part.own)
        cell[:, cell[1] > _REMEMBERED] /= 2

    def _cell(self, name: str, sureness: int) -> NDArray[np.float64]:
        key = name, sureness
        if key not in self._cells:
            self._cells[key] = np.zeros((2, 8))
        return self._cells[key]
