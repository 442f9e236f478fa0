"""Penalties on tokens that a sequence already holds, and the counts behind them.

Counts are kept by token that occurs, not by token of the vocabulary: a penalty touches a few hundred logits of a row,
so neither memory nor work grows with the vocabulary, and rows without a penalty have no counts. They are rebuilt from
prompt and emitted tokens, so a replayed row continues as it was.

Two scopes, as the served dialects have them:
    output only       frequency, then presence, then repetition                           (OpenAI, SGLang)
    prompt + output   repetition, then frequency: its count is divided by the length of the sequence  (TGI)
Presence applies in the second scope too, after frequency, though no dialect asks for both.

Knows counts and logits. It does not know the sampler's table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from model_worker.sampling.stages import JoiningRow, Stage

_VALUES = np.dtype(
    [
        ("frequency", np.float32),
        ("presence", np.float32),
        ("repetition", np.float32),
        ("whole_sequence", np.bool_),
    ]
)


class SeenTokens:
    """Counts of each token in the scope of a sequence's penalties.

    Ids outside the vocabulary (placeholders of images) are left out: they are never chosen.
    """

    def __init__(self, tokens: NDArray[np.int32], vocab_size: int) -> None:
        inside = tokens[(tokens >= 0) & (tokens < vocab_size)]
        self._ids, self._counts = np.unique(inside, return_counts=True)
        self._used = len(self._ids)
        self._places = {int(token): place for place, token in enumerate(self._ids)}

    @property
    def ids(self) -> NDArray[np.int32]:
        return self._ids[: self._used]

    @property
    def counts(self) -> NDArray[np.int64]:
        return self._counts[: self._used]

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, self._used)
        if place == self._used:
            self._append(token)
        self._counts[place] += 1

    def _append(self, token: int) -> None:
        if self._used == len(self._ids):
            spare = max(16, self._used)
            self._ids = np.pad(self._ids, (0, spare))
            self._counts = np.pad(self._counts, (0, spare))
        self._ids[self._used] = token
        self._used += 1


@dataclass(frozen=True)
class Penalties:
    """Values of the rows that have penalties, as columns. `length` counts the tokens of the sequence so far."""

    frequency: NDArray[np.float32]
    presence: NDArray[np.float32]
    repetition: NDArray[np.float32]
    whole_sequence: NDArray[np.bool_]
    length: NDArray[np.int64]

    def apply(self, logits: torch.Tensor, index: NDArray[np.intp], seen: Sequence[SeenTokens]) -> None:
        """Change the logits of the seen tokens in place; entry i of the columns is row `index[i]` of `logits`."""
        lengths = [len(row.ids) for row in seen]
        ids = np.concatenate([row.ids for row in seen]).astype(np.int64)
        counts = np.concatenate([row.counts for row in seen])
        scale = np.where(self.whole_sequence, np.maximum(self.length, 1), 1)
        first = np.where(self.whole_sequence, self.repetition, np.float32(1))
        last = np.where(self.whole_sequence, np.float32(1), self.repetition)
        taken = np.repeat((self.frequency / scale).astype(np.float32), lengths) * counts
        taken += np.repeat(self.presence, lengths)
        place = tuple(torch.from_numpy(part).to(logits.device) for part in (np.repeat(index, lengths), ids))
        values = _repeat(logits[place], np.repeat(first, lengths))
        values = values - torch.from_numpy(taken.astype(np.float32)).to(logits.device)
        logits[place] = _repeat(values, np.repeat(last, lengths))


def _repeat(values: torch.Tensor, penalty: NDArray[np.float32]) -> torch.Tensor:
    factor = torch.from_numpy(penalty).to(values.device)
    return torch.where(values < 0, values * factor, values / factor)


@dataclass(frozen=True, slots=True)
class PenalizedRow:
    """A row's values, in the order of `_VALUES`, and the tokens that it counts."""

    values: tuple[float, float, float, bool]
    seen: SeenTokens


class PenaltyStage(Stage[PenalizedRow]):
    """The rows with penalties."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        super().__init__(max_rows)
        self._vocab_size = vocab_size
        self._values = np.zeros(max_rows, _VALUES)

    def state_of(self, joining: JoiningRow) -> PenalizedRow | None:
        params = joining.params
        if not params.needs_penalties:
            return None
        counted = np.concatenate([joining.prompt, joining.emitted]) if params.penalize_prompt else joining.emitted
        values = (params.frequency_penalty, params.presence_penalty, params.repetition_penalty, params.penalize_prompt)
        return PenalizedRow(values, SeenTokens(counted, self._vocab_size))

    def hold(self, row: int, state: PenalizedRow | None) -> None:
        super().hold(row, state)
        if state is not None:
            self._values[row] = state.values

    def change(
        self, logits: torch.Tensor, index: NDArray[np.intp], rows: list[int], positions: NDArray[np.int64]
    ) -> None:
        values = self._values[rows]
        columns = {name: values[name] for name in _VALUES.names or ()}
        Penalties(length=positions, **columns).apply(logits, index, [self._states[row].seen for row in rows])

    def follow(self, row: int, token: int) -> None:
        self._states[row].seen.add(token)
