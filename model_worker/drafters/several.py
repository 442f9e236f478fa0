"""Several drafters at once: each is asked, the longest expected run wins, and what became of it is learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from interfaces import Join
from model_worker.drafters.base import Drafter, Proposal
from model_worker.drafters.budget import Budget
from model_worker.drafters.hit_rates import HitRates
from model_worker.rows import WorkerRows


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


class Drafters:
    """The drafters of a worker. They read the rows, and follow their sequences from join to drop."""

    def __init__(self, rows: WorkerRows, drafters: Sequence[Drafter], budget: Budget) -> None:
        self.rates = HitRates()
        self._rows = rows
        self._drafters = tuple(drafters)
        self._budget = budget
        self._prompts: dict[int, int] = {}

    def join(self, join: Join) -> None:
        self._prompts[join.row] = join.prompt_len
        self.rates.forget_row(join.row)
        for drafter in self._drafters:
            drafter.joined(join)

    def drop(self, row: int) -> None:
        """The sequence of a row has gone; the row's tokens are there still."""
        prompt = self._prompts.pop(row, None)
        if prompt is not None:
            answer = self._rows.text(row)[prompt:]
            for drafter in self._drafters:
                drafter.left(row, answer)

    def guess(self, room: Mapping[int, int], rows: int, overlaps: bool) -> dict[int, Guesses]:
        """Return the guesses that a pass of `rows` rows should take, by row.

        `room` has how many each row may get. `overlaps` is as `Budget.choose` has it.
        """
        for drafter in self._drafters:
            drafter.rest()
        if not room or self._budget.hopeless(rows, overlaps):
            return {}
        texts = {row: self._rows.text(row) for row in room}
        most = {row: min(count, self._budget.most) for row, count in room.items()}
        best: dict[int, tuple[str, Proposal]] = {}
        reaches: dict[int, NDArray[np.float64]] = {}
        for drafter in self._drafters:
            for row, proposal in drafter.propose(texts, most).items():
                reach = self.rates.reach(row, drafter.name, proposal)
                if row not in best or reach.sum() > reaches[row].sum():
                    best[row] = drafter.name, proposal
                    reaches[row] = reach
        if not best:
            return {}
        counts = self._budget.choose(rows, reaches, overlaps)
        return {row: Guesses(*best[row], count, float(reaches[row][:count].sum())) for row, count in counts.items()}

    def learn(self, row: int, guesses: Guesses, tried: int, right: int) -> None:
        """Of the first `tried` guesses of a row, the first `right` ones were right, and the one behind them wrong."""
        self.rates.learn(row, guesses.drafter, guesses.proposal, tried, right)
        self._budget.learn(guesses.expected, right)
