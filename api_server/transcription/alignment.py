"""When each token of a transcript is spoken: by what the decoder's alignment heads attend to, warped to one path.

The arithmetic is that of transformers for Whisper. Knows weights and frames; knows neither words nor requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shared.recogniser_files import TIME_PRECISION

Weights = NDArray[np.float32]

# Ways to a cell of the path: a step in both, the next token at the same time, and the next time of the same token.
_BOTH = 0
_TOKEN = 1
_TIME = 2


def token_times(weights: Weights, median_width: int) -> list[float]:
    """The seconds at which each token ends, of the attention [tokens, heads, positions] that it pays to a window.

    The last token, which nothing follows, has no attention of its own: its time is that of the one before it.
    """
    if not len(weights):
        return [0.0]
    heads = weights.transpose(1, 0, 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        normal = (heads - heads.mean(axis=1, keepdims=True)) / heads.std(axis=1, keepdims=True)
    smooth = median_filtered(normal, median_width)
    ends = path_of(-smooth.mean(axis=0).astype(np.float64)) * TIME_PRECISION
    times = [max(0.0, float(np.float32(end))) for end in ends]
    return [*times, times[-1]]


def median_filtered(values: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """The median of `width` neighbours along the last axis, whose ends are mirrored."""
    half = width // 2
    if values.shape[-1] <= half:
        return values
    padded = np.pad(values, ((0, 0), (0, 0), (half, half)), mode="reflect")
    views = np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1)
    found: NDArray[np.float32] = np.sort(views, axis=-1)[..., half]
    return found


def path_of(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """The position at which the cheapest path through costs [tokens, positions] enters each token."""
    ways = _ways(costs)
    token, time = costs.shape
    entered = np.zeros(token, np.int64)
    while token > 0 or time > 0:
        way = _TOKEN if time == 0 else _TIME if token == 0 else ways[token, time]
        if token > 0:
            entered[token - 1] = time - 1
        token -= way != _TIME
        time -= way != _TOKEN
    return entered


def _ways(costs: NDArray[np.float64]) -> NDArray[np.int8]:
    """The way by which the cheapest path comes to each cell, diagonal by diagonal. Costs are added in float32."""
    tokens, times = costs.shape
    ways = np.full((tokens + 1, times + 1), _TIME, np.int8)
    total = np.full((tokens + 1, times + 1), np.inf, np.float32)
    total[0, 0] = 0.0
    for diagonal in range(2, tokens + times + 1):
        i = np.arange(max(1, diagonal - times), min(tokens, diagonal - 1) + 1)
        j = diagonal - i
        both, token, time = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        way = np.where((both < token) & (both < time), _BOTH, np.where((token < both) & (token < time), _TOKEN, _TIME))
        ways[i, j] = way
        total[i, j] = costs[i - 1, j - 1] + np.choose(way, (both, token, time)).astype(np.float64)
    return ways
