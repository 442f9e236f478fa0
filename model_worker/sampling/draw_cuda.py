"""The draw of `draw.py` in operations that need no answer from the device: its tokens stay there, and the host does not
wait.

The same definition, over the whole width of the vocabulary, because only the device knows how many tokens are kept.
Noise and truncation are those of `draw.py`, so the tokens are, too. Knows no requests, penalties or row table.
"""

from __future__ import annotations

import numpy as np
import torch

from model_worker.device_copy import upload
from model_worker.sampling import rng
from model_worker.sampling.draw import NARROW, Choices, CutColumns, Edge, edge_in_prefix

# Logits handled at a time: each of a few temporaries takes 128 MB.
CHUNK = 1 << 24


def draw(scaled: torch.Tensor, choices: Choices) -> torch.Tensor:
    """Draw tokens i64[rows] for rows that are not greedy, whose logits arrive shifted and scaled."""
    height = max(1, CHUNK // scaled.shape[1])
    starts = range(0, scaled.shape[0], height)
    parts = [_draw_part(scaled[start : start + height], choices[slice(start, start + height)]) for start in starts]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _draw_part(scaled: torch.Tensor, choices: Choices) -> torch.Tensor:
    keys = upload(choices.keys.view(np.int64), scaled.device)
    scores = scaled + rng.gumbels(keys[:, None], torch.arange(scaled.shape[1], device=scaled.device))
    cut = np.flatnonzero((choices.top_k < scaled.shape[1]) | (choices.top_p < 1) | (choices.log_min_p > -np.inf))
    if len(cut) == len(scores):
        scores = torch.where(kept(scaled, choices), scores, -torch.inf)
    elif len(cut):
        index = upload(cut, scaled.device)
        part = Choices(**{name: column[cut] for name, column in vars(choices).items()})
        scores.index_copy_(0, index, torch.where(kept(scaled[index], part), scores[index], -torch.inf))
    # The first of equal scores, as everywhere.
    return scores.argmax(dim=-1)


def kept(scaled: torch.Tensor, choices: Choices) -> torch.Tensor:
    """Return which tokens are kept: bool[rows, vocabulary]."""
    edge = _edges_of(scaled, choices)
    tied = scaled == edge.value[:, None]
    return (scaled > edge.value[:, None]) | (tied & (tied.cumsum(-1) <= edge.ties[:, None]))


def _edges_of(scaled: torch.Tensor, choices: Choices) -> Edge:
    """Return where the kept tokens of each row end."""
    columns = (choices.top_k.astype(np.int64), choices.top_p, choices.log_min_p)
    asked = CutColumns(*(upload(column, scaled.device) for column in columns))
    # With few tokens to keep, a prefix of the order shows the edge; else it may need all of it.
    if (widest := int(choices.top_k.max())) <= NARROW < scaled.shape[1]:
        ordered = torch.topk(scaled, widest).values
    else:
        ordered = torch.sort(scaled, descending=True).values
    return edge_in_prefix(scaled, ordered, asked)[0]
