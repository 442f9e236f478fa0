"""Deals the texts of a pass to cores, by an estimate of what each costs.

Cores that run the layers together wait for each other after each phase. So a pass that takes few milliseconds runs on
one core, and leaves the others to those who send texts and want vectors; and several texts are dealt into shares of
about the same cost, each of which a core takes through all layers by itself. What is left is run by all cores together:
one long text, or few that differ in length. Knows lengths and costs; knows no kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# A pass of fewer operations runs on one core, which needs about 6 ms for them. It waits for memory most of that time,
# and cores share that.
SMALL_PASS = 5e8
# Operations on fewer bits than float32 has take less time, by this factor.
FEWER_BITS_COST = 0.4
# Tokens of a share: with fewer of them reading the weights takes longer than multiplying.
SHARE_TOKENS = 64
# A pass is dealt into shares if the last core is done before this multiple of what each would need at best.
_MOST_UNEVEN = 1.15


class PassCost(NamedTuple):
    """Operations for each token, and for each pair of tokens of a text."""

    token: float
    pair: float

    def of(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the cost of each text."""
        found: NDArray[np.float64] = self.token * lengths + self.pair * lengths.astype(np.float64) ** 2
        return found


def deal(costs: NDArray[np.float64], lengths: NDArray[np.int64], cores: int) -> tuple[int, NDArray[np.int64]]:
    """Return the number of cores that run a pass, and the first text of each share, and the number of texts.

    One share is run by these cores together.
    """
    whole = np.array([0, len(costs)])
    total = float(costs.sum())
    if cores == 1 or total < SMALL_PASS:
        return 1, whole
    wanted = cores * max(1, int(lengths.sum()) // (cores * SHARE_TOKENS))
    reached = np.concatenate([[0.0], np.cumsum(costs)])
    # Each share ends at the text that is nearest to its part of the whole.
    middles = (reached[1:] + reached[:-1]) / 2
    ends = np.searchsorted(middles, total * np.arange(1, wanted) / wanted)
    shares = np.unique(np.concatenate([whole, ends]))
    if len(shares) == 2 or _longest(np.diff(reached[shares]), cores) > _MOST_UNEVEN * total / cores:
        return cores, whole
    return cores, shares


def _longest(costs: NDArray[np.float64], cores: int) -> float:
    """Return what the core that is done last has done, if each takes the next share when it is free."""
    loads = [0.0] * cores
    for cost in costs.tolist():
        loads[loads.index(min(loads))] += cost
    return max(loads)
