"""The running sequences of one worker as columns, one element a row, so that a decode step is a few numpy operations.

Invariants for a row in use: `num_computed_tokens` tokens have their K/V computed or in flight. `num_tokens` tokens will
be known to the worker once the steps in flight are done; the sequence holds those that are known here.
`num_computed_tokens < num_tokens` whenever there is something left to run.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from scheduler.sequence import Sequence

# `order` of rows of the lowest priority begins here, so that they are younger than all others.
BACKGROUND_ORDER = 1 << 62
# `upto` of a row that waits for no image.
ALL_TOKENS = int(np.iinfo(np.int32).max)

# Fills unused places of `stop_ids`; no token has this id.
_NO_TOKEN = -1


class RowTable:
    """Columns of `max_rows` rows; a row's number is its name on the wire."""

    def __init__(self, max_rows: int) -> None:
        self.sequences: list[Sequence | None] = [None] * max_rows
        # Changes with each owner of a row, so that results for an earlier owner can be distinguished.
        self.version = np.zeros(max_rows, np.int64)
        self.in_use = np.zeros(max_rows, bool)
        self.num_computed_tokens = np.zeros(max_rows, np.int32)
        self.num_tokens = np.zeros(max_rows, np.int32)
        self.limit = np.zeros(max_rows, np.int32)
        # Tokens from this index on wait for an image that the worker encodes.
        self.upto = np.full(max_rows, ALL_TOKENS, np.int32)
        # Whether the row waits until the worker has read its adapter.
        self.awaits_adapter = np.zeros(max_rows, bool)
        # Tokens that this row waits for: another one computes them, or they are loaded or sent; 0: it waits for none.
        self.awaited = np.zeros(max_rows, np.int32)
        # Number of the step that the row joined with; 0 before it.
        self.joined = np.zeros(max_rows, np.int64)
        self.order = np.zeros(max_rows, np.int64)
        self.num_blocks = np.zeros(max_rows, np.int32)
        self.handle = np.zeros(max_rows, np.int32)
        self.replica = np.zeros(max_rows, np.int32)
        # Rows that may report log-probabilities beyond those of their own tokens, or hidden states.
        self.reports = np.zeros(max_rows, bool)
        # Number of tokens whose step still has something to report about the prompt; 0 if there is nothing.
        self.report_end = np.zeros(max_rows, np.int32)
        # Prompt length of rows that run alone, which are always computed in the same pieces; 0 for all others.
        self.fixed = np.zeros(max_rows, np.int32)
        self.stop_ids = np.full((max_rows, 4), _NO_TOKEN, np.int32)
        # Right guesses of steps in flight that may come beyond `num_tokens`.
        self.ahead = np.zeros(max_rows, np.int32)
        # Number of rows of the lowest priority.
        self.background = 0
        self._free = list(range(max_rows))
        self._reporting = 0

    @property
    def any_reports(self) -> bool:
        return self._reporting > 0

    @property
    def running(self) -> int:
        return len(self.sequences) - len(self._free)

    @property
    def free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    @property
    def full(self) -> bool:
        return not self._free

    def occupied(self) -> NDArray[np.int32]:
        """Rows in use, ascending."""
        return np.flatnonzero(self.in_use).astype(np.int32)

    def runnable(self) -> NDArray[np.int32]:
        """Rows with tokens left to compute, ascending.

        A row whose last allowed token is in flight has none, nor has one that waits for an image, an adapter or
        another row.
        """
        unfinished = (self.num_computed_tokens < self.num_tokens) & (self.num_tokens < self.limit)
        unfinished &= (self.num_computed_tokens < self.upto) & ~self.awaits_adapter & (self.awaited == 0)
        return np.flatnonzero(self.in_use & unfinished).astype(np.int32)

    def tokens_to_compute(self, background: bool = True) -> int:
        """Tokens of prompts that are still to be computed for all rows, or for all but those of the lowest priority."""
        left = self.num_tokens - np.maximum(self.num_computed_tokens, self.awaited)
        counted = self.in_use & (left > 1)
        if not background:
            counted &= self.order < BACKGROUND_ORDER
        return int(left[counted].sum())

    def sequence(self, row: int) -> Sequence:
        """The owner of a row in use. ValueError for a free row."""
        sequence = self.sequences[row]
        if sequence is None:
            raise ValueError(f"row {row} is free")
        return sequence

    def has(self, sequence: Sequence) -> bool:
        """Whether a sequence, which may run elsewhere or wait, has its row here."""
        # Others may have more rows.
        return 0 <= sequence.row < len(self.sequences) and self.sequences[sequence.row] is sequence

    def take(self, sequence: Sequence, replica: int, limit: int, cached: int, alone: bool = False) -> int:
        """Give `sequence` the lowest free row; `cached` of its tokens need no computing.

        `alone`: it shares no forward pass, and its prompt is computed in fixed pieces.
        """
        row = heapq.heappop(self._free)
        sequence.row = row
        self.sequences[row] = sequence
        self.in_use[row] = True
        self.version[row] += 1
        self.num_computed_tokens[row] = cached
        self.num_tokens[row] = len(sequence.tokens)
        self.ahead[row] = 0
        self.limit[row] = limit
        self.upto[row] = ALL_TOKENS
        self.awaits_adapter[row] = False
        self.awaited[row] = 0
        self.joined[row] = 0
        self.order[row] = sequence.order + (BACKGROUND_ORDER if sequence.background else 0)
        self.background += sequence.background
        self.num_blocks[row] = len(sequence.blocks)
        self.handle[row] = sequence.handle
        self.replica[row] = replica
        self.reports[row] = sequence.sampling.reports or sequence.context.hidden_states
        self._reporting += int(self.reports[row])
        self.fixed[row] = sequence.prompt_len if alone else 0
        self.report_end[row] = sequence.prompt_len - 1 if sequence.reports_prompt else 0
        if sequence.context.hidden_states:
            self.report_end[row] = len(sequence.tokens)
        self._set_stop_ids(row, [] if sequence.context.ignore_eos else list(sequence.context.eos_token_ids))
        return row

    def give_back(self, row: int) -> Sequence:
        """Free a row. Results in flight for it no longer match its version."""
        sequence = self.sequence(row)
        sequence.row = -1
        self._reporting -= int(self.reports[row])
        self.background -= sequence.background
        self.sequences[row] = None
        self.in_use[row] = False
        self.version[row] += 1
        heapq.heappush(self._free, row)
        return sequence

    def waiting_for_images(self) -> NDArray[np.int32]:
        """Rows whose images the worker is encoding, ascending."""
        return np.flatnonzero(self.in_use & (self.upto < ALL_TOKENS)).astype(np.int32)

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
