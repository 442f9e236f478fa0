"""The residuals of some layers, kept in each pass for a drafter that reads them.

Knows layers and batches. Does not know their purpose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from model_worker.batch import ForwardBatch
from model_worker.cpu.fused.layer import Residuals
from model_worker.model import TakeResiduals

# Of a pass that keeps none.
NO_RESIDUALS = Residuals(np.empty(0, np.int64), np.empty((0, 0, 0), np.float32))


class KeptResiduals:
    """Keeps the residual as it enters `layers`, of passes whose sequences have rows, and gives it to `take`."""

    def __init__(self, layers: Sequence[int], num_layers: int, hidden: int, take: TakeResiduals) -> None:
        """A layer's number may be `num_layers`, which stands for what leaves the last one."""
        self._places = np.full(num_layers + 1, -1)
        self._places[list(layers)] = np.arange(len(layers))
        self._count = len(layers)
        self._hidden = hidden
        self._take = take

    def of_pass(self, batch: ForwardBatch) -> Residuals:
        """Make room for those of a pass."""
        if batch.rows is None:
            return NO_RESIDUALS
        return Residuals(self._places, np.empty((batch.num_tokens, self._count, self._hidden), np.float32))

    def over(self, batch: ForwardBatch, residuals: Residuals) -> None:
        """Give away those of a pass that is over."""
        if len(residuals.places):
            self._take(batch, residuals.vectors)
