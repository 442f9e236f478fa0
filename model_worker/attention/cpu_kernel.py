"""The numba kernel of the cpu backend: paged attention with an online softmax.

Knows arrays: blocks as they lie in memory, `[block, kv_head, offset, element]`, tiles and units as cpu.py cuts them.
A row is one query head of one query token; a tile's rows that share a KV head share its loads. bfloat16 blocks are
widened in registers, arithmetic is float32. Indices are not checked: what is out of place here corrupts memory.
"""

from __future__ import annotations

from typing import Any

import numba.extending
import numpy as np
from numba import njit, prange

from model_worker.cpu.simd.elements import MATH, exp, widened

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic

_LOWEST = np.float32(-1e30)  # of a softmax that has seen no key
# Keys whose scores are taken through the softmax together, to spread what each of its steps costs.
_PANEL_KEYS = 64


@njit(fastmath=MATH, nogil=True, cache=True)
def _tanh(x: np.float32) -> np.float32:
    """Compute tanh to float32 precision. Near zero it is a polynomial, because there e^2x - 1 has few digits left."""
    square = x * x
    y = np.float32(-5.70498872745e-3)
    y = y * square + np.float32(2.06390887954e-2)
    y = y * square + np.float32(-5.37397155531e-2)
    y = y * square + np.float32(1.33314422036e-1)
    y = y * square + np.float32(-3.33332819422e-1)
    near = x + x * square * y
    e = exp(x + x)
    far = (e - np.float32(1.0)) / (e + np.float32(1.0))
    return near if square < np.float32(0.390625) else far


@njit(fastmath=MATH, nogil=True, cache=True)
def _score(q: Any, base: int, rows: int, k: Any, block: int, head: int, keys: int, scores: Any) -> None:
    """Compute scores[r, j] = q[base + r] . k of key j, two rows by two keys at a time: each load serves two
    products."""
    pairs = keys // 2 * 2
    for r in range(0, rows - 1, 2):
        for j in range(0, pairs, 2):
            a = b = c = e = np.float32(0.0)
            for d in range(k.shape[3]):
                q0 = q[base + r, d]
                q1 = q[base + r + 1, d]
                k0 = widened(k[block, head, j, d])
                k1 = widened(k[block, head, j + 1, d])
                a += q0 * k0
                b += q0 * k1
                c += q1 * k0
                e += q1 * k1
            scores[r, j] = a
            scores[r, j + 1] = b
            scores[r + 1, j] = c
            scores[r + 1, j + 1] = e
        for j in range(pairs, keys):
            scores[r, j] = _dot(q, base + r, k, block, head, j)
            scores[r + 1, j] = _dot(q, base + r + 1, k, block, head, j)
    for r in range(rows // 2 * 2, rows):
        for j in range(keys):
            scores[r, j] = _dot(q, base + r, k, block, head, j)


@njit(fastmath=MATH, nogil=True, cache=True)
def _dot(q: Any, row: int, k: Any, block: int, head: int, key: int) -> Any:
    total = np.float32(0.0)
    for d in range(k.shape[3]):
        total += q[row, d] * widened(k[block, head, key, d])
    return total


@njit(fastmath=MATH, nogil=True, cache=True)
def _cap(scores: Any, row: int, keys: int, softcap: np.float32) -> None:
    for j in range(keys):
        scores[row, j] = softcap * _tanh(scores[row, j] / softcap)


@njit(fastmath=MATH, nogil=True, cache=True)
def _weigh(scores: Any, row: int, begin: int, end: int, keys: int, peak: Any, total: Any, acc: Any, state: int) -> None:
    """Turn a row's scores of keys begin to end into weights, and rescale the row's sums to the new maximum."""
    highest = peak[state]
    for j in range(begin, end):
        highest = max(highest, scores[row, j])
    shrink = exp(peak[state] - highest)
    peak[state] = highest
    weights = np.float32(0.0)
    for j in range(begin, end):
        weight = exp(scores[row, j] - highest)
        scores[row, j] = weight
        weights += weight
    for j in range(begin):
        scores[row, j] = np.float32(0.0)
    for j in range(end, keys):
        scores[row, j] = np.float32(0.0)
    total[state] = total[state] * shrink + weights
    if shrink < np.float32(1.0):  # the maximum settles after a few blocks
        for d in range(acc.shape[1]):
            acc[state, d] *= shrink


@njit(fastmath=MATH, nogil=True, cache=True)
def _gather(acc: Any, base: int, rows: int, v: Any, block: int, head: int, keys: int, weights: Any) -> None:
    """Add weights[r, j] * v of key j to acc[base + r], two rows by four keys at a time, to load and store less
    often."""
    fours = keys // 4 * 4
    for r in range(0, rows - 1, 2):
        for j in range(0, fours, 4):
            a0 = weights[r, j]
            a1 = weights[r, j + 1]
            a2 = weights[r, j + 2]
            a3 = weights[r, j + 3]
            b0 = weights[r + 1, j]
            b1 = weights[r + 1, j + 1]
            b2 = weights[r + 1, j + 2]
            b3 = weights[r + 1, j + 3]
            for d in range(v.shape[3]):
                v0 = widened(v[block, head, j, d])
                v1 = widened(v[block, head, j + 1, d])
                v2 = widened(v[block, head, j + 2, d])
                v3 = widened(v[block, head, j + 3, d])
                acc[base + r, d] += a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3
                acc[base + r + 1, d] += b0 * v0 + b1 * v1 + b2 * v2 + b3 * v3
        for j in range(fours, keys):
            _add(acc, base + r, v, block, head, j, weights[r, j])
            _add(acc, base + r + 1, v, block, head, j, weights[r + 1, j])
    for r in range(rows // 2 * 2, rows):
        for j in range(0, fours, 4):
            a0 = weights[r, j]
            a1 = weights[r, j + 1]
            a2 = weights[r, j + 2]
            a3 = weights[r, j + 3]
            for d in range(v.shape[3]):
                v0 = widened(v[block, head, j, d])
                v1 = widened(v[block, head, j + 1, d])
                v2 = widened(v[block, head, j + 2, d])
                v3 = widened(v[block, head, j + 3, d])
                acc[base + r, d] += a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3
        for j in range(fours, keys):
            _add(acc, base + r, v, block, head, j, weights[r, j])


@njit(fastmath=MATH, nogil=True, cache=True)
def _add(acc: Any, row: int, v: Any, block: int, head: int, key: int, weight: Any) -> None:
    for d in range(v.shape[3]):
        acc[row, d] += weight * widened(v[block, head, key, d])


@njit(fastmath=MATH, nogil=True, cache=True)
def _begin_unit(q: Any, tile: Any, first_head: int, states: int, group: int, scale: Any, sinks: Any, own: Any) -> None:
    """Copy the unit's scaled queries and empty its softmax. State h * rows + r is row r of the unit's h-th KV head."""
    queries, acc, peak, total = own
    rows = tile[2] * group
    for state in range(states):
        row = state % rows
        head = (first_head + state // rows) * group + row % group
        for d in range(q.shape[2]):
            queries[state, d] = q[tile[1] + row // group, head, d] * scale
        for d in range(acc.shape[1]):
            acc[state, d] = np.float32(0.0)
        peak[state] = sinks[head] if len(sinks) else _LOWEST
        total[state] = np.float32(1.0) if len(sinks) else np.float32(0.0)


@njit(fastmath=MATH, nogil=True, cache=True)
def _end_unit(out: Any, tile: Any, first_head: int, states: int, group: int, acc: Any, total: Any) -> None:
    rows = tile[2] * group
    for state in range(states):
        row = state % rows
        head = (first_head + state // rows) * group + row % group
        share = np.float32(1.0) / total[state]
        for d in range(acc.shape[1]):
            out[tile[1] + row // group, head, d] = acc[state, d] * share


@njit(fastmath=MATH, nogil=True, cache=True)
def _run_unit(
    k: Any,
    v: Any,
    table: Any,
    tile: Any,
    unit: Any,
    group: int,
    window: int,
    softcap: Any,
    seen: Any,
    scores: Any,
    own: Any,
) -> None:
    """Walk the unit's keys, a panel of blocks at a time, from the first that any of its queries sees to the last."""
    queries, acc, peak, total = own
    block_size = k.shape[2]
    rows = tile[2] * group
    first_position = tile[3]
    end = first_position + tile[2]
    panel = scores.shape[1] // block_size * block_size
    first = max(0, first_position - window + 1)
    for token in range(tile[1], tile[1] + tile[2] if seen.shape[1] else tile[1]):
        first = min(first, seen[0, token])
        end = max(end, seen[1, token] + 1)
    for start in range(first // block_size * block_size, end, panel):
        keys = min(panel, end - start)
        for head in range(unit[1], unit[2]):
            base = (head - unit[1]) * rows
            for key in range(0, keys, block_size):
                block = table[(start + key) // block_size]
                count = min(block_size, keys - key)
                _score(queries, base, rows, k, block, head, count, scores[:, key:])
            for r in range(rows):
                if softcap > 0:
                    _cap(scores, r, keys, softcap)
                position = first_position + r // group
                begin = position - window + 1
                last = position
                if seen.shape[1]:
                    begin = min(begin, seen[0, tile[1] + r // group])
                    last = max(last, seen[1, tile[1] + r // group])
                visible = max(0, min(keys, last - start + 1))
                hidden = min(max(0, begin - start), visible)
                _weigh(scores, r, hidden, visible, keys, peak, total, acc, base + r)
            for key in range(0, keys, block_size):
                block = table[(start + key) // block_size]
                count = min(block_size, keys - key)
                _gather(acc, base, rows, v, block, head, count, scores[:, key:])


@njit(fastmath=MATH, nogil=True, cache=True)
def run_core(
    core: int,
    q: Any,
    k: Any,
    v: Any,
    tables: Any,
    tiles: Any,
    units: Any,
    bounds: Any,
    scale: Any,
    window: int,
    softcap: Any,
    sinks: Any,
    seen: Any,
    out: Any,
) -> None:
    """Run one core's units. `seen` [2, T] are the first and the last key that each token sees beside those up to its
    own, with all between; or it has no columns."""
    group = q.shape[1] // k.shape[1]
    most = 0
    for u in range(bounds[core], bounds[core + 1]):
        most = max(most, (units[u, 2] - units[u, 1]) * tiles[units[u, 0], 2] * group)
    scores = np.empty((most, max(_PANEL_KEYS, k.shape[2])), np.float32)
    acc = np.empty((most, v.shape[3]), np.float32)
    total = np.empty(most, np.float32)
    own = (np.empty((most, k.shape[3]), np.float32), acc, np.empty(most, np.float32), total)
    for u in range(bounds[core], bounds[core + 1]):
        unit = units[u]
        tile = tiles[units[u, 0]]
        states = (unit[2] - unit[1]) * tile[2] * group
        _begin_unit(q, tile, unit[1], states, group, scale, sinks, own)
        _run_unit(k, v, tables[tile[0]], tile, unit, group, window, softcap, seen, scores, own)
        _end_unit(out, tile, unit[1], states, group, acc, total)


@njit(parallel=True, nogil=True, cache=True)
def run_cores(
    q: Any,
    k: Any,
    v: Any,
    tables: Any,
    tiles: Any,
    units: Any,
    bounds: Any,
    scale: Any,
    window: int,
    softcap: Any,
    sinks: Any,
    seen: Any,
    out: Any,
) -> None:
    for core in prange(len(bounds) - 1):
        run_core(core, q, k, v, tables, tiles, units, bounds, scale, window, softcap, sinks, seen, out)
