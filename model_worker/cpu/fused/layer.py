"""The phases of a decoder layer for a block of tokens: all but attention, which looks beyond the block.

A phase is cut into pieces, for several cores or for one that does them all. Knows arrays: packed weights by address, as
packed_linear.py lays them out. The residual and all sums are float32; operands of products are rounded to bfloat16
first where the weights are bfloat16 and processors multiply it. Indices are not checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from model_worker.cpu.fused.rotary_and_kv import pieces_of, rotate_and_write_kv
from model_worker.cpu.gemm.products import add_product, gated, halves_of
from model_worker.cpu.simd.elements import INSIDE, MATH, element

Q, K, V, O, GATE, UP, DOWN = range(7)  # noqa: E741 - the field's names
BEFORE_ATTENTION, BEFORE_MLP = range(2)

NORM, QKV, PLACE, OUT, MLP_NORM, INNER, MLP_OUT, PARTS = range(8)


class Weights(NamedTuple):
    """The weights of the model. Arrays begin with the layer."""

    panels: NDArray[np.int64]  # [L, 7] addresses of packed weights
    biases: NDArray[np.float32]  # [L, q + k + v outputs]
    norms: NDArray[np.float32]  # [L, 2, hidden]
    head_norms: NDArray[np.float32]  # [L, 2, head_dim] of Q and K, or [L, 2, 0]
    final_norm: NDArray[np.float32]  # [hidden]
    head: int  # address of lm_head's panels
    screen: int  # address of its int8 copy's, as screened_head.py knows it, or 0
    bounds: NDArray[np.float32]  # [panels of lm_head], or nothing
    mlp_width: int
    epsilon: np.float32


class Buffers(NamedTuple):
    """Buffers for T tokens, or for B that are dealt with at a time.

    The operands of products are as wide as panels have steps, and zero beyond their contents.
    """

    hidden: NDArray[Any]  # operand [T, >= hidden]
    qkv: NDArray[np.float32]  # [B, q + k + v outputs]
    q: NDArray[Any]  # operand [T, heads, head_dim]
    keys: NDArray[Any]  # [B, KV heads * head_dim]: K on its way to the cache, of its element type
    heads: NDArray[Any]  # operand [T, >= heads * v's head_dim]
    inner: NDArray[Any]  # operand [B, >= mlp_width]


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def normalise(x: Any, row: int, weight: Any, epsilon: Any, out: Any, to: int) -> None:
    """Write the RMS norm of x[row] to out[to]."""
    total = np.float32(0.0)
    values = x[row]
    normed = out[to]
    for c in range(len(weight)):
        total += values[c] * values[c]
    share = np.float32(1.0) / np.sqrt(total / np.float32(len(weight)) + epsilon)
    for c in range(len(weight)):
        normed[c] = element(values[c] * share * weight[c], out)


@njit(nogil=True, cache=True, **INSIDE)
def _widths(q: Any, cache: Any) -> Any:
    """Return the output widths of Q, K and V."""
    return q.shape[1] * q.shape[2], cache.kv_heads * cache.k_dim, cache.kv_heads * cache.v_dim


@njit(nogil=True, cache=True, **INSIDE)
def _project(layer: int, taken: Any, operand: Any, out: Any, work: Any, own: Any) -> None:
    """Multiply by some halves of panels of Q's, K's and V's weights, which lie anywhere, but are counted as if in a
    row."""
    panels = work.weights.panels
    biases = work.weights.biases
    widths = _widths(work.buffers.q, work.cache)
    start = column = 0
    for part in range(V + 1):
        width = widths[part]
        halves = halves_of(width)
        first = max(taken[0] - start, 0)
        end = min(taken[0] + taken[1] - start, halves)
        if first < end:
            some = (first, end - first)
            weights = panels[layer, part]
            add_product(
                own.core, some, operand, weights, width, out, column, biases, layer, own.weight_format, own.tile
            )
        start = start + halves
        column = column + width


@njit(nogil=True, cache=True, **INSIDE)
def pieces_in(part: int, tokens: int, work: Any) -> Any:
    """Return the number of pieces into which a phase is cut for `tokens` tokens."""
    if part in (NORM, MLP_NORM) or tokens == 0:
        return tokens
    if part == QKV:
        q_width, k_width, v_width = _widths(work.buffers.q, work.cache)
        return halves_of(q_width) + halves_of(k_width) + halves_of(v_width)
    if part == PLACE:
        return pieces_of(tokens, work.buffers.q, work.cache)
    return halves_of(work.weights.mlp_width if part == INNER else work.x.shape[1])


@njit(inline="always")
def do_part(
    part: int, layer: int, block: Any, taken: Any, fresh: bool, x: Any, heads: Any, work: Any, own: Any
) -> None:
    """Run a phase of a layer for a block: its first token, its length, and its first row in the buffers.

    `taken` are the phase's pieces to run: the first, and their number; `fresh` if this core had none before. `x` [T,
    hidden] is the residual, `heads` the operand that attention has made; `work` and `own` are as in phases.py.
    """
    first, count, at = block
    rows = x[first : first + count]
    weights = work.weights
    buffers = work.buffers
    core = own.core
    tile = own.tile
    hidden = buffers.hidden[at : at + count]
    inner = buffers.inner[at : at + count]
    panels = weights.panels
    if part in (NORM, MLP_NORM):
        norm = weights.norms[layer, BEFORE_ATTENTION if part == NORM else BEFORE_MLP]
        for row in range(taken[0], taken[0] + taken[1]):
            normalise(rows, row, norm, weights.epsilon, hidden, row)
    elif part == QKV:
        if fresh:
            own.weight_format.prepare(hidden)
        _project(layer, taken, hidden, buffers.qkv[at : at + count], work, own)
    elif part == PLACE:
        rotate_and_write_kv(layer, block, taken, work)
    elif part == OUT:
        operand = heads[first : first + count]
        out = panels[layer, O]
        biases = weights.biases
        if fresh:
            own.weight_format.prepare(operand)
        add_product(core, taken, operand, out, x.shape[1], rows, 0, biases, -1, own.weight_format, tile)
    elif part == INNER:
        gate = panels[layer, GATE]
        up = panels[layer, UP]
        width = weights.mlp_width
        if fresh:
            own.weight_format.prepare(hidden)
        gated(core, taken, hidden, gate, up, width, inner, own.weight_format, tile, own.other)
    else:
        down = panels[layer, DOWN]
        biases = weights.biases
        if fresh:
            own.weight_format.prepare(inner)
        add_product(core, taken, inner, down, x.shape[1], rows, 0, biases, -1, own.weight_format, tile)


@njit(nogil=True, cache=True, **INSIDE)
def every(pieces: int) -> Any:
    """Return all pieces: the first, and their number. (A tuple of a literal would have its callees compiled once
    more.)"""
    return np.int64(0), np.int64(pieces)
