"""What a draw on a device leaves there: tokens, and the log-probabilities that are reported with them.

Everything is computed before the host has read a token, and lies in one piece of memory. Values are those of
`logprobs.py`. `with_reports` is the form in torch's operations. Knows logits that are shifted, so that the largest is
0, and scaled; knows no sampling values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import LogprobReports
from model_worker.device_copy import ALIGNMENT, upload_together

# Logits handled at a time: each of a few temporaries takes 128 MB.
CHUNK = 1 << 24
_LOW = (1 << 32) - 1
_WORD_BYTES = 4


class ReportSize(NamedTuple):
    """How much the rows of a step report: so many rows, of at most so many most probable tokens and named ones."""

    rows: int
    tops: int
    names: int

    @property
    def words(self) -> int:
        """The words of a row's report: its token's log-probability, those of the most probable tokens, the ids of
        these, and the log-probabilities of the named ones."""
        return 1 + 2 * self.tops + self.names


def report_start(rows: int) -> int:
    """Return the first word of reports behind the tokens of so many rows."""
    in_words = ALIGNMENT // _WORD_BYTES
    return -(-2 * rows // in_words) * in_words


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

    def size(self, width: int) -> ReportSize:
        """Return how much they report of a vocabulary of `width` tokens."""
        return ReportSize(len(self.index), min(max(0, int(self.tops.max())), width), self.names.shape[1])


@dataclass(frozen=True)
class Ahead:
    """Tokens i64[rows] on the device, -1 for a bad row; and where rows ask, memory i32 that has them first, and from
    `report_start` on what these rows report."""

    tokens: torch.Tensor
    asking: AskingRows | None = None
    size: ReportSize | None = None
    packed: torch.Tensor | None = None

    @property
    def memory(self) -> torch.Tensor:
        """What the host has to read."""
        return self.tokens if self.packed is None else self.packed

    def read(self, copied: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float32] | None, LogprobReports | None]:
        """Return tokens, log-probabilities (NaN where a row asked for none) and reports from the copied memory."""
        if self.asking is None or self.size is None:
            return copied, None, None
        count, tops = len(self.tokens), self.size.tops
        tokens = copied[: 2 * count].view(np.int64)
        words = copied[report_start(count) :].reshape(self.size.rows, self.size.words)
        values = words.view(np.float32)
        logprobs = np.full(count, np.nan, np.float32)
        logprobs[self.asking.index] = values[:, 0]
        found = values[:, 1 : 1 + tops], words[:, 1 + tops : 1 + 2 * tops], values[:, 1 + 2 * tops :]
        return tokens, logprobs, _reports(self.asking, values[:, 0], *found)


def with_reports(
    tokens: torch.Tensor, asking: AskingRows, width: int, logits_of: Callable[[slice], torch.Tensor]
) -> Ahead:
    """Compute what rows ask for. `logits_of` gives the logits f32[n, width] of some of the asking rows."""
    size = asking.size(width)
    index, named = upload_together([asking.index, asking.names], tokens.device)
    own = tokens[index].clamp(min=0)
    height = max(1, CHUNK // width)
    slices = [slice(start, start + height) for start in range(0, len(asking.index), height)]
    parts = [_part(logits_of(some), own[some], named[some], size.tops).flatten() for some in slices]
    start = tokens.new_zeros(report_start(len(tokens)), dtype=torch.int32)
    start[: 2 * len(tokens)] = tokens.view(torch.int32)
    return Ahead(tokens, asking, size, torch.cat([start, *parts]))


def _part(logits: torch.Tensor, own: torch.Tensor, named: torch.Tensor, most: int) -> torch.Tensor:
    mass = logits.exp().sum(-1, keepdim=True, dtype=torch.float64).log()
    ids = _most_probable(logits, most)

    def values(of: torch.Tensor) -> torch.Tensor:
        return (logits.gather(1, of).double() - mass).float().view(torch.int32)

    return torch.cat([values(own[:, None]), values(ids), ids.int(), values(named)], 1)


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
    tops: NDArray[np.float32],
    ids: NDArray[np.int32],
    named: NDArray[np.float32],
) -> LogprobReports | None:
    reporting = np.flatnonzero(asking.tops >= 0)
    if not len(reporting):
        return None
    if len(reporting) < len(asking.tops):
        chosen, tops, named = (part[reporting] for part in (chosen, tops, named))
        ids = ids[reporting]
    place, own = np.arange(ids.shape[1]), asking.named[reporting]
    # Impossible tokens are last.
    counts = ((place < asking.tops[reporting, None]) & np.isfinite(tops)).sum(-1)
    taken = place < counts[:, None]
    if named.shape[1]:
        taken = np.hstack([taken, np.arange(named.shape[1]) < own[:, None]])
        ids = np.hstack([ids, asking.names[reporting].astype(np.int32)])
        tops = np.hstack([tops, named])
    return LogprobReports(
        owners=asking.owners[reporting],
        positions=asking.positions[reporting].astype(np.int32),
        chosen=np.ascontiguousarray(chosen),
        tops=counts.astype(np.int32),
        counts=(counts + own).astype(np.int32),
        ids=ids[taken],
        values=tops[taken],
    )
