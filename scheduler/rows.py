"""The running sequences of one worker as columns, one element a row, so that a decode step is a few numpy operations.

Invariants for a row in use: `computed` tokens have their K/V computed or in flight; `known` tokens will be known to
the worker once the steps in flight are done; those that are known here the sequence has. `computed < known` whenever
there is something left to run.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from scheduler.sequence import Sequence

_NO_TOKEN = -1
"""Fills unused places of `stop_ids`; no token has this id."""


class RowTable:
    """Columns of `max_rows` rows; a row's number is its name on the wire."""

    def __init__(self, max_rows: int) -> None:
        self.sequences: list[Sequence | None] = [None] * max_rows
        self.version = np.zeros(max_rows, np.int64)
        self.in_use = np.zeros(max_rows, bool)
        self.num_computed_tokens = np.zeros(max_rows, np.int32)
        self.num_tokens = np.zeros(max_rows, np.int32)
        self.limit = np.zeros(max_rows, np.int32)
        self.order = np.zeros(max_rows, np.int64)
        self.num_blocks = np.zeros(max_rows, np.int32)
        self.handle = np.zeros(max_rows, np.int32)
        self.replica = np.zeros(max_rows, np.int32)
        self.reports = np.zeros(max_rows, bool)
        """Rows that may report more log-probabilities than their tokens', or hidden states."""
        self.report_end = np.zeros(max_rows, np.int32)
        """Tokens up to the last one of which, or of whose successor, there is something to report; 0 when none is."""
        self.fixed = np.zeros(max_rows, np.int32)
        """The prompt's length of deterministic rows, which are computed in the same pieces always; else 0."""
        self.stop_ids = np.full((max_rows, 4), _NO_TOKEN, np.int32)
        self.changes = 0
        """How often it was changed in any way but that a row has one token more."""
        self._free = list(range(max_rows))
        self._reporting = 0
        self._constrained = 0

    @property
    def any_reports(self) -> bool:
        return self._reporting > 0

    @property
    def any_grammar(self) -> bool:
        return self._constrained > 0

    @property
    def running(self) -> int:
        return len(self.sequences) - len(self._free)

    @property
    def full(self) -> bool:
        return not self._free

    def occupied(self) -> NDArray[np.int32]:
        """Rows in use, ascending."""
        return np.flatnonzero(self.in_use).astype(np.int32)

    def runnable(self) -> NDArray[np.int32]:
        """Rows with tokens left to compute, ascending. A row whose last allowed token is in flight has none."""
        return np.flatnonzero(
            self.in_use & (self.num_computed_tokens < self.num_tokens) & (self.num_tokens < self.limit)
        ).astype(np.int32)

    def take(self, sequence: Sequence, replica: int, limit: int, cached: int) -> int:
        """Gives `sequence` the lowest free row; `cached` of its tokens need no computing."""
        self.changes += 1
        row = heapq.heappop(self._free)
        sequence.row = row
        self.sequences[row] = sequence
        self.in_use[row] = True
        self.version[row] += 1
        self.num_computed_tokens[row] = cached
        self.num_tokens[row] = len(sequence.tokens)
        self.limit[row] = limit
        self.order[row] = sequence.order
        self.num_blocks[row] = len(sequence.blocks)
        self.handle[row] = sequence.handle
        self.replica[row] = replica
        self.reports[row] = sequence.sampling.reports or sequence.context.hidden_states
        self._reporting += int(self.reports[row])
        self._constrained += sequence.context.grammar is not None
        self.fixed[row] = sequence.prompt_len if sequence.terms.deterministic else 0
        self.report_end[row] = sequence.prompt_len - 1 if sequence.reports_prompt else 0
        if sequence.context.hidden_states:
            self.report_end[row] = len(sequence.tokens)
        self._set_stop_ids(row, [] if sequence.context.ignore_eos else list(sequence.context.eos_token_ids))
        return row

    def give_back(self, row: int) -> Sequence:
        """Frees a row; results in flight for it no longer match its generation."""
        sequence = self.sequences[row]
        if sequence is None:
            raise ValueError(f"row {row} is free")
        self.changes += 1
        sequence.row = -1
        self._reporting -= int(self.reports[row])
        self._constrained -= sequence.context.grammar is not None
        self.sequences[row] = None
        self.in_use[row] = False
        self.version[row] += 1
        heapq.heappush(self._free, row)
        return sequence

    def hits_stop(self, rows: NDArray[np.int32], tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether each row's new token is one of its stop ids."""
        return np.asarray((self.stop_ids[rows] == tokens[:, None]).any(axis=1))

    def _set_stop_ids(self, row: int, ids: list[int]) -> None:
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            grown = np.full((len(self.stop_ids), len(ids)), _NO_TOKEN, np.int32)
            grown[:, :width] = self.stop_ids
            self.stop_ids = grown
        self.stop_ids[row] = _NO_TOKEN
        self.stop_ids[row, : len(ids)] = ids
