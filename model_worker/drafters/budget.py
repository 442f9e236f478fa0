"""How many guesses of each row a pass takes.

A guess is worth the probability that its row comes as far, and costs what one more token of a pass costs. In a full
batch hardly any pays, and none is taken. Both are learnt (`hit_rates.py`, `pass_times.py`), so now and then a pass
takes no guesses, or some that seem not to pay, to learn anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from model_worker.drafters.pass_times import MOST_TOKENS, PassTimes

# Guesses must be this much faster than none, as what is learnt is never quite true.
LEAST_GAIN = 1.03
# Steps within which a pass without guesses was measured.
_MEASURED_WITHIN = 64
# Passes in which guesses seemed not to pay, until some are tried again; twice as many after each trial, up to a bound.
_FIRST_PAUSE = 32
_LONGEST_PAUSE = 1024
# The same after guesses that were better than believed.
_SHORT_PAUSE = 2
# Guesses of a trial.
_TRIED = 3
# Most guesses of all rows: each may take a row of logits.
_MOST_GUESSES = 96


class Budget(Protocol):
    """Chooses how many guesses of each row a pass takes."""

    # Most guesses of a row.
    most: int

    def hopeless(self, rows: int, overlaps: bool) -> bool:
        """Whether no guesses would be taken for so many rows, however good they were."""
        ...

    def choose(self, rows: int, reaches: Mapping[int, NDArray[np.float64]], overlaps: bool) -> dict[int, int]:
        """Return how many guesses to take by row, for those that get any.

        `reaches` are the probabilities that a row comes as far as each of its guesses; there are `rows` rows in all.
        `overlaps`: without guesses, the next step would be launched before this one's tokens are read.
        """
        ...

    def learn(self, expected: float, right: int) -> None:
        """So many guesses of a row were right, and so many had been expected to be."""
        ...


class FixedBudget:
    """Takes every guess."""

    def __init__(self, most: int) -> None:
        self.most = most

    def hopeless(self, rows: int, overlaps: bool) -> bool:
        return False

    def choose(self, rows: int, reaches: Mapping[int, NDArray[np.float64]], overlaps: bool) -> dict[int, int]:
        return {row: len(reach) for row, reach in reaches.items()}

    def learn(self, expected: float, right: int) -> None:
        """Nothing changes what it takes."""


class LearntBudget:
    """Takes those guesses with which most tokens are expected in a second."""

    def __init__(self, most: int, times: PassTimes) -> None:
        self.most = most
        self._times = times
        # By the number of rows (in powers of two): passes since guesses paid or were tried, and how many to wait.
        self._idle: dict[int, int] = {}
        self._pause: dict[int, int] = {}

    def hopeless(self, rows: int, overlaps: bool) -> bool:
        room = self._room(rows)
        if room <= 0:
            return True
        speeds = self._speeds(rows, np.ones(room), overlaps)
        if speeds is None:
            return True
        size = rows.bit_length()
        if speeds.max() >= LEAST_GAIN * speeds[0]:
            return False
        self._idle[size] = self._idle.get(size, 0) + 1
        return self._idle[size] < self._pause.get(size, _FIRST_PAUSE)

    def choose(self, rows: int, reaches: Mapping[int, NDArray[np.float64]], overlaps: bool) -> dict[int, int]:
        owners = np.repeat(list(reaches), [len(reach) for reach in reaches.values()])
        reach = np.concatenate([*reaches.values()])
        # A row's guesses come in their order: the probability to come as far never grows.
        order = np.argsort(-reach, kind="stable")[: self._room(rows)]
        speeds = self._speeds(rows, reach[order], overlaps)
        if speeds is None:
            return {}
        size = rows.bit_length()
        count = int(np.argmax(speeds))
        if speeds[count] >= LEAST_GAIN * speeds[0]:
            if not self._times.knows(rows, _MEASURED_WITHIN):
                return {}
            self._idle[size] = 0
            self._pause[size] = _FIRST_PAUSE
        else:
            count = min(len(order), self._trial(size))
        chosen, counts = np.unique(owners[order[:count]], return_counts=True)
        return dict(zip(chosen.tolist(), counts.tolist(), strict=True))

    def learn(self, expected: float, right: int) -> None:
        if right > 2 * expected:
            self._pause = dict.fromkeys(self._pause, _SHORT_PAUSE)

    def _trial(self, size: int) -> int:
        """Return how many guesses to try although they seem not to pay: none, but now and then."""
        self._idle[size] = self._idle.get(size, 0) + 1
        pause = self._pause.get(size, _FIRST_PAUSE)
        if self._idle[size] < pause:
            return 0
        self._idle[size] = 0
        self._pause[size] = min(2 * pause, _LONGEST_PAUSE)
        return _TRIED

    def _room(self, rows: int) -> int:
        return min(_MOST_GUESSES, rows * self.most, MOST_TOKENS - rows)

    def _speeds(self, rows: int, reach: NDArray[np.float64], overlaps: bool) -> NDArray[np.float64] | None:
        """Return the tokens expected in a second with no guess, the first one, the first two, and so on."""
        seconds = self._times.seconds(rows, rows + len(reach))
        if seconds is None:
            return None
        tokens = rows + np.concatenate([[0.0], np.cumsum(reach)])
        drawing = tokens * self._times.draw_seconds
        if overlaps:
            drawing[0] = 0.0
        speeds: NDArray[np.float64] = tokens / (seconds + drawing)
        return speeds
