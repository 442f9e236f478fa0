"""Several drafters at once: each is asked, the longest expected run wins, and what became of it is learnt.

Those that run a model are asked last, for the rows of which the others know little, and only if that pays.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from interfaces import Join
from model_worker.drafters.base import Drafter, ModelDrafter, Proposal
from model_worker.drafters.budget import Budget
from model_worker.drafters.hit_rates import HitRates
from model_worker.drafters.pass_times import PassTimes
from model_worker.rows import WorkerRows

# Right guesses of a row that the others expect, from which on no model is asked.
ENOUGH = 1.0
# Right guesses of a model that are believed before any is known.
_BELIEVED_RIGHT = 1.0
# Weight of a new value among those before it.
_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Guesses:
    """The first `count` guesses of a proposal, which a pass takes; so many of them are `expected` to be right."""

    drafter: str
    proposal: Proposal
    count: int
    expected: float

    @property
    def tokens(self) -> NDArray[np.int32]:
        return self.proposal.tokens[: self.count]


@dataclass(slots=True)
class _Asked:
    """What asking a model gave and took: right guesses of a row, and seconds by the number of rows (powers of two)."""

    right: float
    seconds: dict[int, float]


@dataclass(slots=True)
class _Best:
    """The best proposal of each row so far, its drafter, and the probabilities to come as far as each guess."""

    proposals: dict[int, tuple[str, Proposal]]
    reaches: dict[int, NDArray[np.float64]]


class Drafters:
    """The drafters of a worker. They read the rows, and follow their sequences from join to drop."""

    def __init__(
        self,
        rows: WorkerRows,
        drafters: Sequence[Drafter],
        budget: Budget,
        times: PassTimes,
        models: Sequence[ModelDrafter] = (),
    ) -> None:
        self.rates = HitRates()
        self._rows = rows
        self._drafters = tuple(drafters)
        self._models = tuple(models)
        self._budget = budget
        self._times = times
        self._prompts: dict[int, int] = {}
        self._asked = {model.name: _Asked(_BELIEVED_RIGHT, {}) for model in models}

    def join(self, join: Join) -> None:
        self._prompts[join.row] = join.prompt_len
        self.rates.forget_row(join.row)
        for drafter in (*self._drafters, *self._models):
            drafter.joined(join)

    def drop(self, row: int) -> None:
        """The sequence of a row has gone; the row's tokens are there still."""
        prompt = self._prompts.pop(row, None)
        if prompt is not None:
            answer = self._rows.text(row)[prompt:]
            for drafter in (*self._drafters, *self._models):
                drafter.left(row, answer)

    def guess(self, room: Mapping[int, int], rows: int, overlaps: bool) -> dict[int, Guesses]:
        """Return the guesses that a pass of `rows` rows should take, by row. No pass may be in flight.

        `room` has how many each row may get. `overlaps` is as `Budget.choose` has it.
        """
        found = self._without_models(room, rows, overlaps)
        for model in self._models:
            asked = self._unsure(found, room)
            if asked and self._pays(model, rows, len(asked), final=True):
                self._ask(model, {row: room[row] for row in asked}, found)
        return self._chosen(found, rows, overlaps, final=True)

    def may_guess(self, room: Mapping[int, int], rows: int, overlaps: bool) -> bool:
        """Whether `guess` would give some, by the texts that were read so far. Called once a step."""
        self._budget.begin(rows)
        for drafter in self._drafters:
            drafter.rest()
        found = self._without_models(room, rows, overlaps)
        if self._chosen(found, rows, overlaps, final=False):
            return True
        asked = len(self._unsure(found, room))
        return asked > 0 and any(self._pays(model, rows, asked, final=False) for model in self._models)

    def learn(self, row: int, guesses: Guesses, tried: int, right: int) -> None:
        """Of the first `tried` guesses of a row, the first `right` ones were right, and the one behind them wrong."""
        self.rates.learn(row, guesses.drafter, guesses.proposal, tried, right)
        self._budget.learn(guesses.expected, right)
        if guesses.drafter in self._asked:
            asked = self._asked[guesses.drafter]
            asked.right += _WEIGHT * (right - asked.right)

    def _without_models(self, room: Mapping[int, int], rows: int, overlaps: bool) -> _Best:
        found = _Best({}, {})
        if room and self._drafters and not self._budget.hopeless(rows, overlaps):
            texts = {row: self._rows.text(row) for row in room}
            most = self._most(room)
            for drafter in self._drafters:
                self._add(found, drafter.name, drafter.propose(texts, most))
        return found

    def _ask(self, model: ModelDrafter, room: Mapping[int, int], found: _Best) -> None:
        begun = time.perf_counter()
        proposals = model.propose({row: self._rows.text(row) for row in room}, self._most(room))
        taken = time.perf_counter() - begun
        self._times.leave_out(taken)
        seconds = self._asked[model.name].seconds
        size = len(room).bit_length()
        known = seconds.get(size, taken)
        seconds[size] = known + _WEIGHT * (min(taken, 2 * known) - known)
        self._add(found, model.name, proposals)

    def _pays(self, model: ModelDrafter, rows: int, count: int, final: bool) -> bool:
        asked = self._asked[model.name]
        size = count.bit_length()
        seconds = asked.seconds.get(size, max(asked.seconds.values(), default=0.0))
        return self._budget.pays(rows, count, asked.right, model.most, seconds, final)

    def _unsure(self, found: _Best, room: Mapping[int, int]) -> list[int]:
        """Return the rows for which hardly a right guess is expected."""
        return [row for row in room if row not in found.reaches or float(found.reaches[row].sum()) < ENOUGH]

    def _add(self, found: _Best, name: str, proposals: Mapping[int, Proposal]) -> None:
        for row, proposal in proposals.items():
            reach = self.rates.reach(row, name, proposal)
            if row not in found.reaches or reach.sum() > found.reaches[row].sum():
                found.proposals[row] = name, proposal
                found.reaches[row] = reach

    def _chosen(self, found: _Best, rows: int, overlaps: bool, final: bool) -> dict[int, Guesses]:
        if not found.reaches:
            return {}
        counts = self._budget.choose(rows, found.reaches, overlaps, final)
        return {
            row: Guesses(*found.proposals[row], count, float(found.reaches[row][:count].sum()))
            for row, count in counts.items()
        }

    def _most(self, room: Mapping[int, int]) -> dict[int, int]:
        return {row: min(count, self._budget.most) for row, count in room.items()}
