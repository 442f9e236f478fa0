"""Truncation of a row of logits to the kept tokens, then a Gumbel-max draw among them.

The rows arrive shifted and scaled: the largest logit is exactly 0 and the temperature is already divided out. Tokens
are ordered by logit, highest first, and among equal logits the lower id comes first; each truncation keeps a prefix of
that order, so the kept set needs only a threshold and the number of tokens kept at the threshold, and does not depend
on any sort's habits:

top-k   the first k tokens, exactly k also when logits are equal at the edge
top-p   the shortest prefix whose probability, renormalised over the top-k tokens, reaches top_p; at least one token
min-p   every token at least min_p times as probable as the first one (ties included)

`choose` is the torch form for any device; on the CPU it hands over to the kernel in `draw_cpu.py`, which has the same
definition. Neither knows requests, penalties or the row table. Sums are float64, so the width of a batch cannot move an
edge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import LogprobMode
from model_worker.sampling import draw_cpu, rng

# Width tried first when the edge of top-p must be found on a device where sorting the whole vocabulary is dear.
NARROW = 1024

# Logits handled at a time when noise is drawn with torch; bounds the memory of the temporaries to a few hundred MB.
CHUNK = 1 << 22


@dataclass(frozen=True)
class Choices:
    """The choices of a batch's rows, as columns. `top_k` is the vocabulary's width where every token is kept."""

    greedy: NDArray[np.bool_]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float64]
    log_min_p: NDArray[np.float32]
    keys: NDArray[np.uint64]
    logprobs: NDArray[np.int8]

    def __getitem__(self, part: slice) -> Choices:
        return Choices(**{name: column[part] for name, column in vars(self).items()})


class Edge(NamedTuple):
    """The end of a row's kept prefix: everything above `value`, and the first `ties` tokens equal to it."""

    value: torch.Tensor
    ties: torch.Tensor


def choose(
    scaled: torch.Tensor, first: torch.Tensor, choices: Choices, has_kernels: bool = True
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw tokens and log-probabilities (NaN where the row asked for none); `first` holds each row's most likely
    token."""
    if scaled.device.type == "cpu" and has_kernels:
        return draw_cpu.choose(scaled.numpy(), first.numpy(), *vars(choices).values())
    return choose_torch(scaled, first, choices)


def only_kept(scaled: torch.Tensor, choices: Choices) -> torch.Tensor:
    """Return a copy with -inf for all tokens that are not kept; every row must ask for WARPED, or not be greedy."""
    rows, tokens = _kept(scaled, _edge(scaled, choices))
    masked = torch.full_like(scaled, -torch.inf)
    masked[rows, tokens] = scaled[rows, tokens]
    return masked


def choose_torch(
    scaled: torch.Tensor, first: torch.Tensor, choices: Choices
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw as `choose` in torch operations, a bounded number of logits at a time."""
    height = max(1, CHUNK // scaled.shape[1])
    starts = range(0, scaled.shape[0], height)
    parts = [_choose_part(scaled[i : i + height], first[i : i + height], choices[slice(i, i + height)]) for i in starts]
    return np.concatenate([tokens for tokens, _ in parts]), np.concatenate([logprobs for _, logprobs in parts])


def _choose_part(
    scaled: torch.Tensor, first: torch.Tensor, choices: Choices
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    edge = _edge(scaled, choices)
    rows, tokens = _kept(scaled, edge)
    chosen = first.clone()
    drawn = np.flatnonzero(~choices.greedy)
    if len(drawn):
        index = torch.from_numpy(drawn).to(scaled.device)
        chosen[index] = _gumbel_max(scaled, rows, tokens, choices)[index]
    logprobs = _logprobs(scaled, chosen, rows, tokens, choices)
    return chosen.cpu().numpy(), logprobs.cpu().numpy()


def _edge(scaled: torch.Tensor, choices: Choices) -> Edge:
    height, width = scaled.shape
    # A greedy row needs its kept tokens only for the probability of its choice among them.
    idle = choices.greedy & (choices.logprobs != LogprobMode.WARPED)
    value = torch.from_numpy(np.where(idle, np.float32(np.inf), np.float32(-np.inf))).to(scaled.device)
    ties = torch.full((height,), width, dtype=torch.int64, device=scaled.device)
    cut = np.flatnonzero(~idle & ((choices.top_k < width) | (choices.top_p < 1) | (choices.log_min_p > -np.inf)))
    if len(cut):
        index = torch.from_numpy(cut).to(scaled.device)
        value[index], ties[index] = _edge_of_cut_rows(scaled[index], _device_columns(choices, cut, scaled.device))
    return Edge(value, ties)


class CutColumns(NamedTuple):
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor


def _device_columns(choices: Choices, cut: NDArray[np.intp], device: torch.device) -> CutColumns:
    columns = (choices.top_k[cut].astype(np.int64), choices.top_p[cut], choices.log_min_p[cut])
    return CutColumns(*(torch.from_numpy(column).to(device) for column in columns))


def _edge_of_cut_rows(scaled: torch.Tensor, columns: CutColumns) -> Edge:
    width = scaled.shape[1]
    limited = columns.top_k[columns.top_k < width]
    narrow = max(NARROW, int(limited.max())) if len(limited) else NARROW
    if narrow < width:
        edge, found = edge_in_prefix(scaled, torch.topk(scaled, narrow).values, columns)
        if bool(found.all()):
            return edge
    return edge_in_prefix(scaled, torch.sort(scaled, descending=True).values, columns)[0]


def edge_in_prefix(scaled: torch.Tensor, ordered: torch.Tensor, columns: CutColumns) -> tuple[Edge, torch.Tensor]:
    """Return the edge, as far as the first logits of the order show it, and whether they show it."""
    width = ordered.shape[1]
    whole = width == scaled.shape[1]
    ranks = torch.arange(width, device=ordered.device)
    within_k = ranks < columns.top_k[:, None]
    mass = torch.where(within_k, ordered.double().exp(), 0.0)
    summed = mass.cumsum(-1)
    beyond = columns.top_k > width
    total = summed[:, -1] if whole else torch.where(beyond, scaled.double().exp().sum(-1), summed[:, -1])
    short = (summed < (columns.top_p * total)[:, None]) & (columns.top_p < 1)[:, None]
    count = torch.where(columns.top_p < 1, short.sum(-1) + 1, columns.top_k).minimum(columns.top_k)
    likely = (ordered >= columns.log_min_p[:, None]).sum(-1)
    count = count.minimum(torch.where((likely < width) | whole, likely, columns.top_k)).clamp(min=1)
    found = count <= width
    value = ordered.gather(1, (count.clamp(max=width) - 1)[:, None])
    ties = count - (ordered > value).sum(-1)
    return Edge(value[:, 0], ties), found


def _kept(scaled: torch.Tensor, edge: Edge) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (row, token) of every kept token, row by row, tokens in ascending order."""
    rows, tokens = torch.nonzero(scaled >= edge.value[:, None], as_tuple=True)
    tied = scaled[rows, tokens] == edge.value[rows]
    per_row = torch.zeros_like(edge.ties).index_add_(0, rows, tied.long())
    before = per_row.cumsum(0) - per_row
    kept = ~tied | (tied.cumsum(0) - before[rows] <= edge.ties[rows])
    return rows[kept], tokens[kept]


def _gumbel_max(scaled: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, choices: Choices) -> torch.Tensor:
    keys = torch.from_numpy(choices.keys.view(np.int64)).to(scaled.device)
    scores = scaled[rows, tokens] + rng.gumbels(keys[rows], tokens)
    best = torch.full((scaled.shape[0],), -torch.inf, dtype=scores.dtype, device=scores.device)
    best.scatter_reduce_(0, rows, scores, "amax")
    winners = scores == best[rows]
    chosen = torch.full((scaled.shape[0],), scaled.shape[1] - 1, dtype=torch.int64, device=scores.device)
    return chosen.scatter_reduce_(0, rows[winners], tokens[winners], "amin")


def _logprobs(
    scaled: torch.Tensor, chosen: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, choices: Choices
) -> torch.Tensor:
    out = torch.full((scaled.shape[0],), torch.nan, device=scaled.device)
    for mode in (LogprobMode.TEMPERED, LogprobMode.WARPED):
        asked = np.flatnonzero(choices.logprobs == mode)
        if len(asked):
            index = torch.from_numpy(asked).to(scaled.device)
            mass = _mass(scaled, index, rows, tokens, mode)
            out[index] = (scaled[index, chosen[index]].double() - mass.log()).float()
    return out


def _mass(
    scaled: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, mode: int
) -> torch.Tensor:
    if mode == LogprobMode.TEMPERED:
        return scaled[index].double().exp().sum(-1)
    mass = torch.zeros(scaled.shape[0], dtype=torch.float64, device=scaled.device)
    return mass.index_add_(0, rows, scaled[rows, tokens].double().exp())[index]
