"""The states of recurrent layers: tensors of a fixed size for each row, beside the KV cache.

Knows rows and how many of their tokens a state stands for. Does not know what a layer computes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_worker.batch import ForwardBatch

# Tokens of a row whose state stands for none: a pass over it has begun, and has not come to its end.
_UNKNOWN = -1


class StateKey(NamedTuple):
    """A state of one layer, as transformers' cache names it. `kind` is "conv" or "recurrent"."""

    kind: str
    layer: int
    number: int


@dataclass(frozen=True)
class StateShape:
    """The shape of one row's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StateLayout:
    """The states of all recurrent layers."""

    states: Mapping[StateKey, StateShape]

    @property
    def bytes_per_row(self) -> int:
        return sum(state.num_bytes for state in self.states.values())


class RecurrentStates:
    """The states of `num_rows` rows, [num_rows + spare, ...] each. A row that begins has zeros.

    With a `spare` row, `spare_row`, recorded steps pad with it.
    """

    def __init__(self, layout: StateLayout, num_rows: int, device: torch.device, spare: int = 0) -> None:
        self.layout = layout
        self.spare_row = num_rows
        self._num_rows = num_rows + spare
        # Tokens of each row that its state stands for.
        self.positions = np.zeros(self._num_rows, np.int64)
        self.tensors: dict[StateKey, Tensor] = {}
        self._device = device
        self.restore()

    @property
    def num_bytes(self) -> int:
        return self._num_rows * self.layout.bytes_per_row

    def release(self) -> None:
        """Give the memory back, and with it all states."""
        self.tensors = {}

    def restore(self) -> None:
        """Take memory for the states, if there is none: zeros."""
        if not self.tensors:
            self.positions[:] = 0
            self.tensors = {
                key: _zeros((self._num_rows, *state.shape), state.dtype, self._device)
                for key, state in self.layout.states.items()
            }

    def begin(self, batch: ForwardBatch) -> NDArray[np.int64]:
        """Prepare the rows of a pass, and return them. Those without earlier tokens begin anew.

        Until `end` their states stand for no tokens: layers change them one after the other, and a pass that fails
        leaves some changed. Sequences without rows have the first ones. RuntimeError for a row whose state stands for
        other tokens than those before the pass: a state cannot go back, and no prefix of another row has one.
        """
        starts, lengths = batch.starts, batch.query_lens
        if starts is None or lengths is None:
            raise ValueError("a batch for recurrent layers needs its lengths on the host: use ForwardBatch.build")
        rows = batch.state_rows
        fresh = rows[starts == 0]
        wrong = self.positions[rows] != starts
        if batch.rows is not None and (wrong & (starts > 0)).any():
            row = int(rows[wrong & (starts > 0)][0])
            stands = int(self.positions[row])
            raise RuntimeError(
                f"row {row} goes on behind {int(starts[rows == row][0])} tokens, and its recurrent state "
                + ("was left by a pass that failed" if stands == _UNKNOWN else f"stands for {stands}")
            )
        if len(fresh):
            index = torch.from_numpy(fresh).to(self._device)
            for tensor in self.tensors.values():
                tensor.index_fill_(0, index, 0)
        self.positions[rows] = _UNKNOWN
        return rows

    def end(self, batch: ForwardBatch, rows: NDArray[np.int64]) -> None:
        """Note that the states of a batch's rows stand for its tokens, too: all layers have written theirs."""
        assert batch.starts is not None
        assert batch.query_lens is not None
        self.positions[rows] = batch.starts + batch.query_lens


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make zeros. On a CPU the kernel provides their pages when they are first used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages: NDArray[Any] = np.zeros(prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
