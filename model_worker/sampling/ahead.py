"""What a draw on a device leaves there: tokens, and the log-probabilities that are reported with them.

Everything is computed before the host has read a token. Values are those of `logprobs.py`. Knows logits that are
shifted, so that the largest is 0, and scaled; knows no sampling values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import LogprobReports
from model_worker.device_copy import upload_together

# Logits handled at a time: each of a few temporaries takes 128 MB.
CHUNK = 1 << 24
_LOW = (1 << 32) - 1


@dataclass(frozen=True)
class AskingRows:
    """Rows of a step that report log-probabilities: their places in it, owners, positions, and what they want."""

    index: NDArray[np.int64]
    owners: NDArray[np.int32]
    positions: NDArray[np.int64]
    # How many of the most probable tokens; -1: the chosen token's alone, which is no report.
    tops: NDArray[np.int32]
    # Named tokens i64[A, M], of which a row has the first so many.
    names: NDArray[np.int64]
    named: NDArray[np.int32]


@dataclass(frozen=True)
class Ahead:
    """Tokens i64[rows] on the device, -1 for a bad row; and for rows that ask, their log-probabilities f32."""

    tokens: torch.Tensor
    asking: AskingRows | None = None
    # Of the chosen token [A], of the most probable [A, K] with their ids, and of the named ones [A, M].
    chosen: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    tops: torch.Tensor | None = None
    named: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the host has to read."""
        found = (self.tokens, self.chosen, self.ids, self.tops, self.named)
        return [tensor for tensor in found if tensor is not None]

    def read(
        self, arrays: Sequence[NDArray[Any]]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32] | None, LogprobReports | None]:
        """Return tokens, log-probabilities (NaN where a row asked for none) and reports from the copied `tensors`."""
        tokens = arrays[0]
        if self.asking is None:
            return tokens, None, None
        chosen, ids, tops, named = arrays[1:]
        logprobs = np.full(len(tokens), np.nan, np.float32)
        logprobs[self.asking.index] = chosen
        return tokens, logprobs, _reports(self.asking, chosen, ids, tops, named)


def with_reports(
    tokens: torch.Tensor, asking: AskingRows, width: int, logits_of: Callable[[slice], torch.Tensor]
) -> Ahead:
    """Compute what rows ask for. `logits_of` gives the logits f32[n, width] of some of the asking rows."""
    most = max(0, int(asking.tops.max()))
    index, named = upload_together([asking.index, asking.names], tokens.device)
    own = tokens[index].clamp(min=0)
    height = max(1, CHUNK // width)
    slices = [slice(start, start + height) for start in range(0, len(asking.index), height)]
    parts = [_part(logits_of(some), own[some], named[some], most) for some in slices]
    if len(parts) == 1:
        return Ahead(tokens, asking, *parts[0])
    return Ahead(tokens, asking, *(torch.cat(part) for part in zip(*parts, strict=True)))


def _part(logits: torch.Tensor, own: torch.Tensor, named: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    mass = logits.exp().sum(-1, keepdim=True, dtype=torch.float64).log()
    ids = _most_probable(logits, min(most, logits.shape[1]))

    def values(of: torch.Tensor) -> torch.Tensor:
        return (logits.gather(1, of).double() - mass).float()

    return values(own[:, None])[:, 0], ids, values(ids), values(named)


def _most_probable(logits: torch.Tensor, most: int) -> torch.Tensor:
    """Return the ids of the largest logits; among equals the lower id comes first."""
    # Both zeros are one number.
    bits = (logits + 0.0).contiguous().view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = logits.shape[1] - 1
    keys = (order << 32) | (last - torch.arange(last + 1, device=logits.device))
    return last - (torch.topk(keys, most).values & _LOW)


def _reports(
    asking: AskingRows,
    chosen: NDArray[np.float32],
    ids: NDArray[np.int64],
    tops: NDArray[np.float32],
    named: NDArray[np.float32],
) -> LogprobReports | None:
    reporting = np.flatnonzero(asking.tops >= 0)
    if not len(reporting):
        return None
    place, own = np.arange(ids.shape[1]), asking.named[reporting]
    # Impossible tokens are last.
    counts = (np.isfinite(tops[reporting]) & (place < asking.tops[reporting, None])).sum(-1)
    taken = np.hstack([place < counts[:, None], np.arange(asking.names.shape[1]) < own[:, None]])
    return LogprobReports(
        owners=asking.owners[reporting],
        positions=asking.positions[reporting].astype(np.int32),
        chosen=chosen[reporting],
        tops=counts.astype(np.int32),
        counts=(counts + own).astype(np.int32),
        ids=np.hstack([ids[reporting], asking.names[reporting]])[taken].astype(np.int32),
        values=np.hstack([tops[reporting], named[reporting]])[taken].astype(np.float32),
    )
