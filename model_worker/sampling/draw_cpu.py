"""The CPU form of `draw.py`: the same kept tokens and the same draw, one row at a time, without sorting the vocabulary.

A first pass counts tokens (a second one adds up probability, when top-p needs it) in buckets of an eighth of a nat
below the largest logit, and only the bucket that holds an edge is sorted. The draw skips a token without taking a
logarithm when a bound shows that it cannot win: a vocabulary of 150,000 costs about one integer hash a token. Rows
are independent of each other, so they are shared out to threads (the kernel releases the GIL) and a row's result
cannot depend on the batch.

numba caches compiled code per source file: `uniform_at` is compiled into the kernel, so delete the cache after
changing `rng.py`.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import math

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import LogprobMode
from model_worker.sampling.rng import uniform_at

PER_NAT = 8
# 40 nats, and one bucket for the rest: what lies there has a probability below 1e-17 of the first token's.
BUCKETS = 321

# Logits below which handing work to another thread costs more than it saves.
WORTH_A_THREAD = 1 << 16

_TEMPERED = LogprobMode.TEMPERED
_WARPED = LogprobMode.WARPED


def choose(
    scaled: NDArray[np.float32],
    first: NDArray[np.int64],
    greedy: NDArray[np.bool_],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float64],
    log_min_p: NDArray[np.float32],
    keys: NDArray[np.uint64],
    logprobs: NDArray[np.int8],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw tokens and log-probabilities of all rows; the columns are those of `draw.Choices`."""
    height = len(first)
    tokens = np.empty(height, np.int64)
    chosen_logprobs = np.full(height, np.nan, np.float32)
    columns = (scaled, first, greedy, top_k, top_p, log_min_p, keys, logprobs, tokens, chosen_logprobs)
    shares = min(height, torch.get_num_threads(), max(1, scaled.size // WORTH_A_THREAD))
    if shares == 1:
        _choose_rows(*columns)
        return tokens, chosen_logprobs
    bounds = [height * i // shares for i in range(shares + 1)]
    parts = [[column[a:b] for column in columns] for a, b in itertools.pairwise(bounds)]
    list(_threads(torch.get_num_threads()).map(lambda part: _choose_rows(*part), parts))
    return tokens, chosen_logprobs


@functools.cache
def _threads(count: int) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix="sampler")


@numba.njit(cache=True, nogil=True)
def _choose_rows(
    scaled: NDArray[np.float32],
    first: NDArray[np.int64],
    greedy: NDArray[np.bool_],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float64],
    log_min_p: NDArray[np.float32],
    keys: NDArray[np.uint64],
    logprobs: NDArray[np.int8],
    tokens: NDArray[np.int64],
    chosen_logprobs: NDArray[np.float32],
) -> None:
    for i in range(scaled.shape[0]):
        row = scaled[i]
        edge = np.float32(-np.inf)
        ties = row.shape[0]
        if not greedy[i] or logprobs[i] == _WARPED:
            edge, ties = _edge(row, top_k[i], top_p[i], log_min_p[i])
        tokens[i] = first[i] if greedy[i] else _draw(row, keys[i], first[i], edge, ties)
        if logprobs[i] == _TEMPERED:
            chosen_logprobs[i] = row[tokens[i]] - math.log(_mass(row, np.float32(-np.inf), row.shape[0]))
        elif logprobs[i] == _WARPED:
            chosen_logprobs[i] = row[tokens[i]] - math.log(_mass(row, edge, ties))


@numba.njit(cache=True, nogil=True)
def _bucket(value: np.float32) -> int:
    # Compared before the conversion: an integer made from infinity is undefined.
    return int(-value * PER_NAT) if -value * PER_NAT < BUCKETS - 1 else BUCKETS - 1


@numba.njit(cache=True, nogil=True)
def _edge(row: NDArray[np.float32], top_k: int, top_p: float, log_min_p: np.float32) -> tuple[np.float32, int]:
    """Return the lowest kept logit and how many tokens equal to it are kept."""
    edge = np.float32(-np.inf)
    ties = row.shape[0]
    if top_k < row.shape[0] or top_p < 1:
        counts = _counts(row)
        bucket, left = _locate_count(counts, min(top_k, row.shape[0]))
        if top_p < 1:
            bucket, left = _locate_mass(row, counts, bucket, left, top_p)
        rising = _rising(row, bucket, counts[bucket])
        edge = rising[len(rising) - left]
        ties = 1
        while ties < left and rising[len(rising) - left + ties] == edge:
            ties += 1
    if log_min_p > edge:
        return log_min_p, row.shape[0]
    return edge, ties


@numba.njit(cache=True, nogil=True)
def _counts(row: NDArray[np.float32]) -> NDArray[np.int64]:
    """Count the tokens in each bucket."""
    counts = np.zeros(BUCKETS, np.int64)
    for value in row:
        counts[_bucket(value)] += 1
    return counts


@numba.njit(cache=True, nogil=True)
def _masses(row: NDArray[np.float32], last: int) -> NDArray[np.float64]:
    """Return the probability in each bucket up to `last`, relative to the first token's."""
    masses = np.zeros(last + 1, np.float64)
    for value in row:
        bucket = _bucket(value)
        if bucket <= last:
            masses[bucket] += math.exp(np.float64(value))
    return masses


@numba.njit(cache=True, nogil=True)
def _rising(row: NDArray[np.float32], bucket: int, count: int) -> NDArray[np.float32]:
    """Return the values in a bucket, the largest last. Loops over them take numba less time to compile than
    expressions."""
    found = np.empty(count, np.float32)
    filled = 0
    for value in row:
        if _bucket(value) == bucket:
            found[filled] = value
            filled += 1
    found.sort()
    return found


@numba.njit(cache=True, nogil=True)
def _locate_count(counts: NDArray[np.int64], wanted: int) -> tuple[int, int]:
    """Return the bucket of the `wanted`-th token, and its rank there, from 1."""
    bucket = 0
    while wanted > counts[bucket]:
        wanted -= counts[bucket]
        bucket += 1
    return bucket, wanted


@numba.njit(cache=True, nogil=True)
def _locate_mass(
    row: NDArray[np.float32],
    counts: NDArray[np.int64],
    last: int,
    left: int,
    top_p: float,
) -> tuple[int, int]:
    """Return the bucket and rank where the probability reaches top_p, in the prefix that ends at rank `left` of
    `last`."""
    masses = _masses(row, last)
    if left < counts[last]:
        rising = _rising(row, last, counts[last])
        mass = 0.0
        for i in range(left):
            mass += math.exp(np.float64(rising[len(rising) - 1 - i]))
        masses[last] = mass
    everything = 0.0
    for mass in masses:
        everything += mass
    target = top_p * everything
    bucket = 0
    summed = 0.0
    while bucket < last and (counts[bucket] == 0 or summed + masses[bucket] < target):
        summed += masses[bucket]
        bucket += 1
    limit = left if bucket == last else counts[bucket]
    rising = _rising(row, bucket, counts[bucket])
    rank = 1
    summed += math.exp(np.float64(rising[len(rising) - 1]))
    while rank < limit and summed < target:
        summed += math.exp(np.float64(rising[len(rising) - 1 - rank]))
        rank += 1
    return bucket, rank


@numba.njit(cache=True, nogil=True)
def _mass(row: NDArray[np.float32], edge: np.float32, ties: int) -> float:
    """Return the probability of the kept tokens relative to the first token's."""
    total = 0.0
    for value in row:
        if value > edge:
            total += math.exp(np.float64(value))
        elif value == edge and ties > 0:
            total += math.exp(np.float64(value))
            ties -= 1
    return total


@numba.njit(cache=True, nogil=True)
def _draw(row: NDArray[np.float32], key: np.uint64, first: int, edge: np.float32, ties: int) -> int:
    """Draw by Gumbel-max over the kept tokens; among equal scores the lower id."""
    # The first token is always kept, and a good score to begin with is what lets the bound skip the others.
    best = _score(row[first], uniform_at(key, first))
    chosen = first
    for token in range(row.shape[0]):
        value = row[token]
        if value < edge or (value == edge and ties <= 0):
            continue
        if value == edge:
            ties -= 1
        uniform = uniform_at(key, token)
        if _cannot_win(best - value, uniform):
            continue
        score = _score(value, uniform)
        if score > best or (score == best and token < chosen):
            best = score
            chosen = token
    return chosen


@numba.njit(cache=True, nogil=True)
def _score(value: np.float32, uniform: float) -> float:
    return np.float64(value) - math.log(-math.log(uniform))


@numba.njit(cache=True, nogil=True)
def _cannot_win(deficit: float, uniform: float) -> bool:
    """Whether the noise is surely below `deficit`, as -log(-log u) <= -log(1 - u) and (1 + d/16)^16 <= e^d for d > -16.

    The best score starts at the first token's, at least -3.7 (the least noise), so the deficit never leaves that range.
    """
    power = 1.0 + deficit * 0.0625
    power *= power
    power *= power
    power *= power
    power *= power
    return power * (1.0 - uniform) > 1.000001
