"""From logits to reports: each token's own log-probability, the most probable tokens', and those of named tokens.

Logits are reduced to these few numbers at once, a bounded number at a time, and sums are float64. Among equal logits
the lower id comes first, as everywhere in the sampler. Knows no sampling values and no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import LogprobReports

# Logits that are float64 at a time: 32 MB.
CHUNK = 1 << 22


@dataclass(frozen=True)
class Wanted:
    """The log-probabilities that a row wants with each token."""

    top: int
    ids: NDArray[np.int64]

    @property
    def any(self) -> bool:
        """Whether the row wants more than the chosen token's."""
        return bool(self.top or len(self.ids))


CHOSEN_ONLY = Wanted(0, np.empty(0, np.int64))


class ReportBuilder:
    """Gathers the entries of one step."""

    def __init__(self) -> None:
        self._parts: list[LogprobReports] = []

    def add(self, owner: int, first: int, logits: torch.Tensor, tokens: NDArray[np.integer], wanted: Wanted) -> None:
        """Add entries: `logits[i]` [P, vocab], shifted and scaled or not, chose or predict `tokens[i]` at `first +
        i`."""
        height = max(1, CHUNK // logits.shape[1])
        for start in range(0, len(tokens), height):
            part = slice(start, start + height)
            self._parts.append(_reduced(owner, first + start, logits[part], tokens[part], wanted))

    def columns(self) -> LogprobReports | None:
        """Return all entries; None when there are none."""
        return LogprobReports.joined(self._parts) if self._parts else None


def _reduced(
    owner: int, first: int, logits: torch.Tensor, tokens: NDArray[np.integer], wanted: Wanted
) -> LogprobReports:
    count = len(tokens)
    exact = logits.double()
    # Each row by itself: torch adds up a single row in another order than several.
    exact = exact - torch.stack([torch.logsumexp(row, -1, keepdim=True) for row in exact])
    own = exact.gather(1, torch.from_numpy(tokens.astype(np.int64)).to(exact.device)[:, None])[:, 0]
    asked = exact[:, torch.from_numpy(wanted.ids).to(exact.device)].cpu().numpy()
    rows, ids, values = _most_probable(exact, wanted.top)
    tops = np.bincount(rows, minlength=count)
    # Each row's most probable tokens, then the ids it named: a stable sort by row keeps that order.
    of_row = np.concatenate([rows, np.repeat(np.arange(count), len(wanted.ids))])
    order = np.argsort(of_row, kind="stable")
    return LogprobReports(
        owners=np.full(count, owner, np.int32),
        positions=np.arange(first, first + count, dtype=np.int32),
        chosen=own.float().cpu().numpy(),
        tops=tops.astype(np.int32),
        counts=(tops + len(wanted.ids)).astype(np.int32),
        ids=np.concatenate([ids, np.tile(wanted.ids, count)])[order].astype(np.int32),
        values=np.concatenate([values, asked.ravel()])[order].astype(np.float32),
    )


def _most_probable(exact: torch.Tensor, top: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return (row, token, value) of the `top` most probable tokens of each row, most probable first; never
    impossible ones."""
    top = min(top, exact.shape[1])
    if top == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float64)
    edge = torch.topk(exact, top).values[:, -1:].clamp(min=torch.finfo(torch.float64).min)
    found, ids = torch.nonzero(exact >= edge, as_tuple=True)
    columns = (found.cpu().numpy(), ids.cpu().numpy(), exact[found, ids].cpu().numpy())
    order = np.lexsort((columns[1], -columns[2], columns[0]))
    rows, tokens, values = (column[order] for column in columns)
    starts = np.searchsorted(rows, np.arange(exact.shape[0]))
    kept = np.arange(len(rows)) - starts[rows] < top
    return rows[kept], tokens[kept], values[kept]
