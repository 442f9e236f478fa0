"""The watermark of Kirchenbauer et al., with TGI's constants: the last token seeds a permutation of the vocabulary, and
the tokens in its first half, the green list, get a bonus.

The generator is always the CPU's, so that a text can be tested without the device it was made on. Knows logits, and the
last token of each of its rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from model_worker.sampling.stages import JoiningRow, Stage

# Share of the vocabulary that is green.
GAMMA = 0.5
# Bonus on the logits of green tokens.
DELTA = 2.0
HASH_KEY = 15485863


def green_list(last: int, vocab_size: int) -> torch.Tensor:
    """Return the green tokens after token `last`."""
    generator = torch.Generator("cpu").manual_seed(HASH_KEY * last)
    return torch.randperm(vocab_size, generator=generator)[: int(vocab_size * GAMMA)]


def favour_green(logits: torch.Tensor, last: int) -> None:
    """Add the bonus to one row of logits, in place."""
    logits[green_list(last, logits.shape[0]).to(logits.device)] += DELTA


class Watermark(Stage[int]):
    """The rows with a watermark, and the last token of each."""

    def state_of(self, joining: JoiningRow) -> int | None:
        return joining.last if joining.params.watermark else None

    def change(
        self, logits: torch.Tensor, index: NDArray[np.intp], rows: list[int], positions: NDArray[np.int64]
    ) -> None:
        for i, row in zip(index.tolist(), rows, strict=True):
            favour_green(logits[i], self._states[row])

    def follow(self, row: int, token: int) -> None:
        self._states[row] = token
