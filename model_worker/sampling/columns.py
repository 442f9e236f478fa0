"""Changes of logits by columns that lie on their device, in torch's operations: grammars' bitmasks, and penalties on
counted tokens.

Nothing waits for the device. The draw's kernels do the same in their first pass. Knows columns; knows no requests and
no grammars.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from model_worker.device_copy import upload

WORD_BITS = 32


class PenaltyColumns(NamedTuple):
    """Penalties of rows, on the host: repetition by `first`, then the others, then repetition by `last`."""

    frequency: NDArray[np.float32]
    presence: NDArray[np.float32]
    first: NDArray[np.float32]
    last: NDArray[np.float32]


def forbid(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Put -inf where bit t of `words[i]` i32[n, words] is 0, in row `rows[i]` of the logits, in place."""
    width = min(logits.shape[1], words.shape[1] * WORD_BITS)
    at = torch.arange(width, dtype=torch.int32, device=logits.device)
    allowed = (words[:, at // WORD_BITS] >> (at % WORD_BITS)) & 1
    found = logits[rows]
    found[:, :width].masked_fill_(allowed == 0, -torch.inf)
    logits[rows] = found


def penalise(
    logits: torch.Tensor,
    counts: torch.Tensor,
    index: NDArray[np.int64],
    slots: NDArray[np.int64],
    columns: PenaltyColumns,
) -> None:
    """Penalise tokens of which `counts[slots[i]]` is not 0, in row `index[i]` of the float32 `logits`."""
    places = upload(np.stack([index, slots]), logits.device)
    frequency, presence, first, last = upload(np.stack(columns), logits.device)[:, :, None]
    number = counts[places[1]]
    before = logits[places[0]]
    after = torch.where(before < 0, before * first, before / first)
    after = after - (frequency.double() * number + presence.double()).float()
    after = torch.where(after < 0, after * last, after / last)
    logits[places[0]] = torch.where(number > 0, after, before)
