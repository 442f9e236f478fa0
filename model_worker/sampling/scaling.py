"""The steps of every draw in torch's operations before its truncations: stages, then shift and temperature.

Knows rows of logits; knows no noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from model_worker.device_copy import upload
from model_worker.sampling.stages import AnyStage


def change_and_scale(
    logits: torch.Tensor,
    stages: Sequence[AnyStage],
    rows: NDArray[np.int32],
    positions: NDArray[np.int64],
    temperature: NDArray[np.float32],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Change the float32 logits of `rows` by the stages, shift them so that the largest is 0, and divide by the
    temperature, in place. Returns the largest before that, and the first tokens that have it."""
    for stage in stages:
        stage.apply(logits, rows, positions)
    top, first = logits.max(dim=-1)
    shift_and_divide(logits, top, temperature)
    return top, first


def shift_and_divide(logits: torch.Tensor, top: torch.Tensor, temperature: NDArray[np.float32]) -> None:
    """Subtract a row's `top`, and divide by its temperature, in place."""
    logits.sub_(top[:, None])
    if (temperature != 1).any():
        logits.div_(upload(temperature.copy(), logits.device)[:, None])
