"""What a draw on a device takes of its rows, kept from step to step: only a row that comes or goes is written.

Knows records, bitmasks and lists of rows; knows no logits and no kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import LogprobMode
from model_worker.cuda.draw_record import NAMES, RECORD

_OF_A_STEP = ("position", "mask", "changed", "report", "logprobs")
_POSITION, _MASK, _CHANGED, _REPORT, _LOGPROBS = (NAMES.index(name) for name in _OF_A_STEP)
_OF_THE_SAMPLER = ("seed", "greedy", "temperature", "top_k", "top_p", "log_min_p")
_FREE = {"greedy": 1, "temperature": 1.0, "mask": -1, "slot": -1, "changed": -1, "report": -1}
_NO_LIST = np.empty(0, np.int64)


class RowMasks(NamedTuple):
    """Bitmasks of grammars, i32[n, words], and the places of their rows in the step, i64[n]."""

    places: NDArray[np.int64]
    words: NDArray[np.int32]


class RecordTable:
    """The records of all rows, and what rows list: rules on tokens, and tokens that they name. A free row is greedy."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # The same memory twice: rows are quickly taken from columns of one type.
        self._words = np.zeros((max_rows, len(NAMES)), np.int64)
        self.table = self._words.view(RECORD)[:, 0]
        self.table["place"] = np.arange(max_rows)
        # By row: rules and names.
        self._lists: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        # All of them, one after the other, and whether the device lacks some.
        self._all = _NO_LIST
        self._changed = False
        self._there: torch.Tensor | None = None
        self._reporting: set[int] = set()
        # Which rows have penalties or rules.
        self._changing = np.zeros(max_rows, np.bool_)
        for row in range(max_rows):
            self.drop(row)

    def hold(self, row: int, values: NDArray[np.void] | np.void, names: NDArray[np.int64]) -> None:
        """Take a row's values, a record of ROW_VALUES, and the tokens whose log-probabilities it reports."""
        for name in _OF_THE_SAMPLER:
            self.table[name][row] = values[name]
        # There is room for as many most probable tokens as there are.
        self.table["top_logprobs"][row] = min(int(values["top_logprobs"]), self._vocab_size)
        if values["logprobs"] or values["reports"]:
            self._reporting.add(row)
            is_warped = values["logprobs"] == LogprobMode.WARPED
            self.table["logprobs"][row] = LogprobMode.WARPED if is_warped else LogprobMode.TEMPERED
        if len(names):
            self._list(row, _NO_LIST, names)

    def penalise(self, row: int, slot: int, penalties: np.void) -> None:
        """Give a row its penalties, and the place of its counts."""
        self.table["slot"][row] = slot
        self._changing[row] = True
        for name in ("whole_sequence", "frequency", "presence", "repetition"):
            self.table[name][row] = penalties[name]

    def rule(self, row: int, rules: NDArray[np.int64], restricts: int, may_stop_at: int) -> None:
        """Give a row its rules on tokens, and how far they are in force."""
        self.table["restricts"][row] = restricts
        self.table["may_stop_at"][row] = may_stop_at
        self._changing[row] = True
        self._list(row, rules, self._lists.get(row, (_NO_LIST, _NO_LIST))[1])

    def drop(self, row: int) -> None:
        """Free a row."""
        place = self._words[row, 0]
        self._words[row] = 0
        self._words[row, 0] = place
        for name, value in _FREE.items():
            self.table[name][row] = value
        self._lists.pop(row, None)
        self._reporting.discard(row)
        self._changing[row] = False

    def arrays(
        self, rows: NDArray[np.int32], positions: NDArray[np.int64], masked: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return what goes to the device: the rows' records i64[rows, words], of which those `masked` have a bitmask
        each, in order; and the lists of all rows, or nothing, if the device has them."""
        if self._changed:
            self._all = self._joined()
        lists = self._all if self._changed else _NO_LIST
        records = self._words.take(rows, axis=0)
        records[:, _POSITION] = positions
        if self._reporting:
            reporting = np.flatnonzero(records[:, _LOGPROBS])
            records[reporting, _REPORT] = np.arange(len(reporting))
        changing = np.flatnonzero(self._changing[rows])
        records[changing, _CHANGED] = np.arange(len(changing))
        if masked is not None:
            records[masked, _MASK] = np.arange(len(masked))
        return records, lists

    def changing(self, rows: NDArray[np.int32]) -> int:
        """Return how many of these rows have penalties or rules."""
        return int(self._changing[rows].sum())

    def lists(self, sent: torch.Tensor) -> torch.Tensor | None:
        """Return the lists of all rows on the device, of which `sent` are the last that went there."""
        if len(sent):
            self._there = sent
            self._changed = False
        return self._there

    def names(self, rows: NDArray[np.int32], most: int) -> NDArray[np.int64]:
        """Return the tokens that rows name, i64[rows, most], and 0 behind them. The `arrays` of these rows were made
        before."""
        if not most:
            return np.zeros((len(rows), 0), np.int64)
        place, first = np.arange(most), self.table["names"].take(rows)[:, None]
        own = place < self.table["name_count"].take(rows)[:, None]
        # Where a row has no more names, what is found there counts for nothing.
        return np.where(own, self._all.take(first + place, mode="clip"), 0)

    def _list(self, row: int, rules: NDArray[np.int64], names: NDArray[np.int64]) -> None:
        self._lists[row] = rules, names
        self._changed = True

    def _joined(self) -> NDArray[np.int64]:
        """Join the lists, and write into the records where those of a row begin."""
        table, start, parts = self.table, 0, []
        for row, lists in self._lists.items():
            for name, count, part in zip(("rules", "names"), ("rule_count", "name_count"), lists, strict=True):
                table[name][row], table[count][row] = start, len(part)
                start += len(part)
                parts.append(part)
        return np.concatenate(parts) if parts else _NO_LIST
