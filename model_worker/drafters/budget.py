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
# Right guesses beyond twice those expected, added up while there are any, from which on guesses count as better than
# believed. A single right guess is chance: some are right also where text does not repeat.
_SURPRISE = 2.0
# Guesses of a trial.
_TRIED = 3
# Most guesses of all rows: each may take a row of logits.
_MOST_GUESSES = 96


class Budget(Protocol):
    """Chooses how many guesses of each row a pass takes. `rows` is the number of all rows of the pass."""

    # Most guesses of a row.
    most: int

    def begin(self, rows: int) -> None:
        """A step begins that may take guesses."""
        ...

    def hopeless(self, rows: int, overlaps: bool) -> bool:
        """Whether no guesses would be taken, however good they were."""
        ...

    def choose(
        self, rows: int, reaches: Mapping[int, NDArray[np.float64]], overlaps: bool, final: bool
    ) -> dict[int, int]:
        """Return how many guesses to take by row, for those that get any.

        `reaches` are the probabilities that a row comes as far as each of its guesses. `overlaps`: without guesses, the
        next step would be launched before this one's tokens are read. `final`: these guesses will be taken.
        """
        ...

    def pays(self, rows: int, asked: int, right: float, most: int, seconds: float, final: bool) -> bool:
        """Whether to ask a model for guesses at `asked` of the rows, which takes `seconds`.

        It gives up to `most` guesses of each, and `right` of them are right on average. `final`: it will be asked.
        """
        ...

    def learn(self, expected: float, right: int) -> None:
        """So many guesses of a row were right, and so many had been expected to be."""
        ...


class FixedBudget:
    """Takes every guess."""

    def __init__(self, most: int) -> None:
        self.most = most

    def begin(self, rows: int) -> None:
        """Every step is like the others."""

    def hopeless(self, rows: int, overlaps: bool) -> bool:
        return False

    def choose(
        self, rows: int, reaches: Mapping[int, NDArray[np.float64]], overlaps: bool, final: bool
    ) -> dict[int, int]:
        return {row: len(reach) for row, reach in reaches.items()}

    def pays(self, rows: int, asked: int, right: float, most: int, seconds: float, final: bool) -> bool:
        return True

    def learn(self, expected: float, right: int) -> None:
        """Nothing changes what it takes."""


class _Trials:
    """When guesses are tried that seem not to pay: after a pause, which is twice as long after each trial."""

    def __init__(self) -> None:
        # By the number of rows (in powers of two): steps since guesses paid or were tried, and how many to wait.
        self._idle: dict[int, int] = {}
        self._pause: dict[int, int] = {}

    def count(self, rows: int) -> None:
        """A step begins."""
        self._idle[rows.bit_length()] = self._idle.get(rows.bit_length(), 0) + 1

    def due(self, rows: int) -> bool:
        size = rows.bit_length()
        return self._idle.get(size, 0) >= self._pause.get(size, _FIRST_PAUSE)

    def paid(self, rows: int) -> None:
        self._idle[rows.bit_length()] = 0
        self._pause[rows.bit_length()] = _FIRST_PAUSE

    def tried(self, rows: int) -> None:
        size = rows.bit_length()
        self._idle[size] = 0
        self._pause[size] = min(2 * self._pause.get(size, _FIRST_PAUSE), _LONGEST_PAUSE)

    def hurry(self) -> None:
        """Try again soon: guesses were better than believed."""
        self._pause = dict.fromkeys(self._pause, _SHORT_PAUSE)


class LearntBudget:
    """Takes those guesses with which most tokens are expected in a second."""

    def __init__(self, most: int, times: PassTimes) -> None:
        self.most = most
        self._times = times
        self._guesses = _Trials()
        self._models = _Trials()
        # Right guesses beyond twice those expected, of late.
        self._beyond = 0.0

    def begin(self, rows: int) -> None:
        self._guesses.count(rows)
        self._models.count(rows)

    def hopeless(self, rows: int, overlaps: bool) -> bool:
        room = self._room(rows)
        speeds = self._speeds(rows, np.ones(room), overlaps) if room > 0 else None
        if speeds is None:
            return True
        return bool(speeds.max() < LEAST_GAIN * speeds[0]) and not self._guesses.due(rows)

    def choose(
        self, rows: int, reaches: Mapping[int, NDArray[np.float64]], overlaps: bool, final: bool
    ) -> dict[int, int]:
        owners = np.repeat(list(reaches), [len(reach) for reach in reaches.values()])
        reach = np.concatenate([*reaches.values()])
        # A row's guesses come in their order: the probability to come as far never grows.
        order = np.argsort(-reach, kind="stable")[: self._room(rows)]
        speeds = self._speeds(rows, reach[order], overlaps)
        if speeds is None:
            return {}
        count = int(np.argmax(speeds))
        if speeds[count] >= LEAST_GAIN * speeds[0]:
            if not self._times.knows(rows, _MEASURED_WITHIN):
                return {}
            if final:
                self._guesses.paid(rows)
        elif self._guesses.due(rows):
            count = min(len(order), _TRIED)
            if final:
                self._guesses.tried(rows)
        else:
            return {}
        chosen, counts = np.unique(owners[order[:count]], return_counts=True)
        return dict(zip(chosen.tolist(), counts.tolist(), strict=True))

    def pays(self, rows: int, asked: int, right: float, most: int, seconds: float, final: bool) -> bool:
        count = min(asked * most, self._room(rows))
        passes = self._times.seconds(rows, rows + count) if count > 0 else None
        if passes is None:
            return False
        drawing = self._times.draw_seconds
        tokens = rows + asked * right
        asking = tokens / (float(passes[-1]) + seconds + tokens * drawing)
        if asking > LEAST_GAIN * rows / (float(passes[0]) + rows * drawing):
            if final:
                self._models.paid(rows)
            return True
        due = self._models.due(rows)
        if due and final:
            self._models.tried(rows)
        return due

    def learn(self, expected: float, right: int) -> None:
        self._beyond = max(0.0, self._beyond + right - 2 * expected)
        if self._beyond >= _SURPRISE:
            self._beyond = 0.0
            self._guesses.hurry()
            self._models.hurry()

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
