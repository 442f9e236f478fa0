"""The seam of everything that changes logits before a token is chosen: a stage holds the rows that ask for it.

`sampler.py` runs its stages in a fixed order: watermark, penalties, rules on tokens, and the operator's processors. A
stage keeps one state for each of its rows, which follows from the row's request and its tokens alone, so a replayed row
goes on as it was. Rows of a step that have not asked cost one look at a column. Knows rows and logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import SamplingParams

S = TypeVar("S")


@dataclass(frozen=True)
class JoiningRow:
    """What a stage may know of a sequence that gets a row; `emitted` are the tokens of its answer so far."""

    params: SamplingParams
    stop_token_ids: Sequence[int]
    prompt: NDArray[np.int32]
    emitted: NDArray[np.int32]

    @property
    def last(self) -> int:
        """The last token of the sequence."""
        return int((self.emitted if len(self.emitted) else self.prompt)[-1])


class Stage(ABC, Generic[S]):
    """One operation on logits, and the state `S` of each row that asks for it."""

    def __init__(self, max_rows: int) -> None:
        self._held = np.zeros(max_rows, np.bool_)
        self._states: dict[int, S] = {}

    @abstractmethod
    def state_of(self, joining: JoiningRow) -> S | None:
        """Make the state of a row; None if it does not ask for this stage. ValueError says why it cannot be had."""

    @abstractmethod
    def change(
        self, logits: torch.Tensor, index: NDArray[np.intp], rows: list[int], positions: NDArray[np.int64]
    ) -> None:
        """Change the logits of this stage's rows in place: entry i of `rows` has the logits of row `index[i]`.

        `positions` are the indices that their new tokens will have in their sequences.
        """

    def follow(self, row: int, token: int) -> None:
        """Record a token by which one of this stage's rows has gone on."""

    def launched(self, rows: NDArray[np.int32], tokens: torch.Tensor) -> None:
        """Record tokens that were drawn for rows and that only the device has."""

    def hold(self, row: int, state: S | None) -> None:
        """Keep the state that `state_of` has made."""
        if state is not None:
            self._states[row] = state
            self._held[row] = True

    def drop(self, row: int) -> None:
        """Free a row, if it is held."""
        self._states.pop(row, None)
        self._held[row] = False

    def holds(self, rows: NDArray[np.int32]) -> bool:
        """Whether any of these rows asks for this stage."""
        return bool(self._states) and bool(self._held[rows].any())

    def apply(self, logits: torch.Tensor, rows: NDArray[np.int32], positions: NDArray[np.int64]) -> None:
        """Change the logits of those of the `rows` that this stage holds; `logits[i]` are those of `rows[i]`."""
        if not self._states:
            return
        index = np.flatnonzero(self._held[rows])
        if len(index):
            self.change(logits, index, rows[index].tolist(), positions[index])

    def chosen(self, rows: NDArray[np.int32], tokens: NDArray[np.int64]) -> None:
        """Record the tokens that were drawn for rows."""
        if not self._states:
            return
        index = np.flatnonzero(self._held[rows])
        for row, token in zip(rows[index].tolist(), tokens[index].tolist(), strict=True):
            self.follow(row, token)

    def followed(self, row: int, tokens: Sequence[int]) -> None:
        """Record tokens by which a row has gone on without a draw."""
        for token in tokens if self._held[row] else ():
            self.follow(row, token)


# Stages of any states.
AnyStage = Stage[Any]
