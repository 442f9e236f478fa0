"""Pooling: one vector for each text from the hidden states of its tokens, in float32.

Knows sentence-transformers' modes. Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from model_worker.pooling.texts import Texts
from model_worker.pooling.torch_threads import one_thread


def pool(hidden: Tensor, texts: Texts, modes: Sequence[str]) -> Tensor:
    """Return [texts, len(modes) * width] of hidden states [T, width]: the vectors of all modes, one after another."""
    with one_thread():
        states = hidden.float()
        vectors = [_MODES[mode](states, texts) for mode in modes]
        return vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=1)


def largest(values: Tensor, texts: Texts) -> Tensor:
    """Return the largest value of each column within each text."""
    return _segments(values, texts, "max")


def total(values: Tensor, texts: Texts) -> Tensor:
    """Return the sum of each column within each text."""
    return _segments(values, texts, "sum")


def _segments(values: Tensor, texts: Texts, reduce: str) -> Tensor:
    if len(texts.runs) == 1:
        # Texts of one length need no kernel for segments.
        _, count, length = texts.runs[0]
        rows = values.unflatten(0, (count, length))
        joined: Tensor = rows.amax(1) if reduce == "max" else rows.sum(1)
        return joined
    found: Tensor = torch.segment_reduce(values, reduce, lengths=texts.counts, axis=0)
    return found


def _count(texts: Texts) -> Tensor:
    """Return the number of counted tokens of each text, at least 1: f32[texts, 1]."""
    if texts.counted is None:
        return texts.counts.float()[:, None]
    return total(texts.counted.float()[:, None], texts).clamp_min(1)


def _counted(hidden: Tensor, texts: Texts) -> Tensor:
    """Return the hidden states with zeros in place of tokens that are left out."""
    return hidden if texts.counted is None else hidden * texts.counted[:, None]


def _mean(hidden: Tensor, texts: Texts) -> Tensor:
    return total(_counted(hidden, texts), texts) / _count(texts)


def _mean_sqrt_len(hidden: Tensor, texts: Texts) -> Tensor:
    return total(_counted(hidden, texts), texts) / _count(texts).sqrt()


def _weighted_mean(hidden: Tensor, texts: Texts) -> Tensor:
    weights = (texts.positions + 1).float()[:, None]
    if texts.counted is not None:
        weights = weights * texts.counted[:, None]
    return total(hidden * weights, texts) / total(weights, texts).clamp_min(1)


def _max(hidden: Tensor, texts: Texts) -> Tensor:
    if texts.counted is not None:
        hidden = hidden.masked_fill(~texts.counted[:, None], -torch.inf)
    return largest(hidden, texts)


def _first(hidden: Tensor, texts: Texts) -> Tensor:
    if texts.counted is None:
        return hidden[texts.bounds[:-1].long()]
    first = texts.pad(texts.counted.int()).argmax(1)
    return hidden[texts.bounds[:-1].long() + first]


def _last(hidden: Tensor, texts: Texts) -> Tensor:
    # A prompt comes before its text, so the last token always counts.
    return hidden[texts.bounds[1:].long() - 1]


_MODES: Mapping[str, Callable[[Tensor, Texts], Tensor]] = {
    "cls": _first,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
