"""What a draw on a device takes of its rows, kept from step to step: only a row that comes or goes is written.

Knows records and bitmasks of rows; knows no logits and no kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model_worker.cuda.draw_record import NAMES, RECORD

_POSITION, _MASK = NAMES.index("position"), NAMES.index("mask")
_OF_THE_SAMPLER = ("seed", "greedy", "temperature", "top_k", "top_p", "log_min_p")


class RowMasks(NamedTuple):
    """Bitmasks of grammars, i32[n, words], and the places of their rows in the step, i64[n]."""

    places: NDArray[np.int64]
    words: NDArray[np.int32]


class RecordTable:
    """The records of all rows. A free row is greedy."""

    def __init__(self, max_rows: int) -> None:
        # The same memory twice: rows are quickly taken from columns of one type.
        self._words = np.zeros((max_rows, len(NAMES)), np.int64)
        self.table = self._words.view(RECORD)[:, 0]
        self.drop(slice(None))
        self.table["place"] = np.arange(max_rows)

    def hold(self, row: int, values: NDArray[np.void] | np.void) -> None:
        """Take a row's values, a record of ROW_VALUES."""
        for name in _OF_THE_SAMPLER:
            self.table[name][row] = values[name]

    def penalise(self, row: int, slot: int, penalties: np.void) -> None:
        """Give a row its penalties, and the place of its counts."""
        self.table["slot"][row] = slot
        for name in ("whole_sequence", "frequency", "presence", "repetition"):
            self.table[name][row] = penalties[name]

    def drop(self, row: int | slice) -> None:
        """Free a row."""
        for name, value in (("greedy", 1), ("temperature", 1.0), ("mask", -1), ("slot", -1)):
            self.table[name][row] = value

    def arrays(
        self, rows: NDArray[np.int32], positions: NDArray[np.int64], masks: RowMasks | None = None
    ) -> list[NDArray[Any]]:
        """Return what goes to the device: the rows' records i64[rows, words], and bitmasks, if there are any."""
        records = self._words.take(rows, axis=0)
        records[:, _POSITION] = positions
        if masks is None:
            return [records]
        records[masks.places, _MASK] = np.arange(len(masks.places))
        return [records, masks.words]
