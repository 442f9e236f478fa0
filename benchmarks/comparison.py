"""The result of a comparison: its cells, and what follows from them: medians with their spread, and ratios of ours.

Knows figures by name. It does not know how they were measured, nor how they are shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.cells import Cell
from benchmarks.contenders import OURS


@dataclass(frozen=True)
class Spread:
    """Of one figure over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        return cls(statistics.median(values), min(values), max(values)) if values else None


@dataclass(frozen=True)
class Comparison:
    """The cells of one session. `starts` has the command and the seconds to the first answer, by server and model."""

    time_limit: float
    threads: int
    load_before: float
    load_after: float = 0.0
    starts: list[Mapping[str, object]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)

    @property
    def works(self) -> list[str]:
        return list(dict.fromkeys(cell.work for cell in self.cells))

    @property
    def contenders(self) -> list[str]:
        return list(dict.fromkeys(cell.contender for cell in self.cells))

    def first(self, work: str) -> Cell:
        """A cell of a work, which shows what figures it has."""
        return next(cell for cell in self.cells if cell.work == work)

    def of(self, work: str, contender: str) -> list[Cell]:
        return [cell for cell in self.cells if (cell.work, cell.contender) == (work, contender)]

    def spread(self, work: str, contender: str, figure: str) -> Spread | None:
        return Spread.of([cell.figures[figure] for cell in self.of(work, contender) if figure in cell.figures])

    def ratio(self, work: str, contender: str, figure: str) -> Spread | None:
        """Ours over theirs: of the medians; the lowest and highest are of single rounds."""
        ours, theirs = self.spread(work, OURS, figure), self.spread(work, contender, figure)
        if contender == OURS or ours is None or theirs is None or not theirs.median:
            return None
        rounds = {cell.round: cell.figures.get(figure) for cell in self.of(work, contender)}
        pairs = [
            cell.figures[figure] / their
            for cell in self.of(work, OURS)
            if figure in cell.figures and (their := rounds.get(cell.round))
        ]
        return Spread(ours.median / theirs.median, min(pairs), max(pairs)) if pairs else None
