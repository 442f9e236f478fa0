"""The angles of rotary positions. Those of the first positions are computed once and kept."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_worker.batch import ForwardBatch
from model_worker.cpu.fused.phases import Rotary

# Angles of positions below this are kept; beyond, they are computed anew in each pass.
KEPT_POSITIONS = 1 << 15
# Passes far beyond those that are kept before more are: one alone, such as the self-check's, is not worth the memory.
_PASSES_BEYOND = 4


class Angles:
    """The angles that a model's rotary module gives."""

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary = rotary
        self._kept = self._compute(torch.arange(1))
        self._passes_beyond = 0

    def of(self, batch: ForwardBatch) -> Rotary:
        if batch.positions.ndim == 2:
            return self._compute(batch.positions)
        positions = batch.positions.numpy()
        most = int(positions.max()) + 1
        if most > KEPT_POSITIONS:
            return self._compute(batch.positions)
        if most > len(self._kept.cos):
            is_far = most > 2 * len(self._kept.cos) + len(positions)
            self._passes_beyond += is_far
            if is_far and self._passes_beyond < _PASSES_BEYOND:
                return self._compute(batch.positions)
            self._passes_beyond = 0
            self._kept = self._compute(torch.arange(min(KEPT_POSITIONS, 2 * most)))
        return self._kept._replace(rows=positions)

    def _compute(self, positions: Tensor) -> Rotary:
        """Return the angles of positions [T], or [3, T] for a rotary embedding that takes three directions."""
        cos, sin = self._rotary(torch.zeros(1, dtype=torch.float32), positions.unsqueeze(-2))
        rows = torch.arange(positions.shape[-1]).numpy()
        return Rotary(cos[0].contiguous().numpy(), sin[0].contiguous().numpy(), rows)
