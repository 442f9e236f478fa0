"""What distinguishes one attention layer's arithmetic from another's. Fixed when the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionParams:
    """A query at position p sees keys p - sliding_window + 1 to p; its logits are softcap * tanh(logit / softcap)."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [query heads]: one more logit per head that takes weight and gives no value
