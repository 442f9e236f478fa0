"""Steps of one image that reuse the prediction of the step before: an approximation that a request asks for.

A denoiser's predictions change little from step to step in the middle of a schedule. The change between the last two
that were computed is taken for that of each step that follows; the sum of these changes since the last computed step
must stay below a threshold. The first two steps and the last are always computed. Knows tensors of one image.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class StepCache:
    """The last prediction of one image, and how much predictions change. `threshold` 0: every step is computed."""

    threshold: float
    _last: Tensor | None = None
    # The relative change between the last two computed predictions; None before there were two.
    _change: float | None = None
    # The change that is expected since the last computed prediction.
    _drift: float = 0.0

    def reused(self, is_last: bool) -> Tensor | None:
        """Return the prediction for a step that needs none of its own, or None."""
        if is_last or self._last is None or self._change is None:
            return None
        drift = self._drift + self._change
        if drift >= self.threshold:
            return None
        self._drift = drift
        return self._last

    def computed(self, prediction: Tensor) -> None:
        """Note a prediction that was computed."""
        if self.threshold <= 0:
            return
        if self._last is not None:
            size = float(self._last.abs().mean())
            self._change = float((prediction - self._last).abs().mean()) / size if size else None
        self._last = prediction
        self._drift = 0.0
