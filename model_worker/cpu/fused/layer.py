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
from torch import Tensor

from model_worker.cpu.fused.rotary_and_kv import pieces_of, rotate_and_write_kv
from model_worker.cpu.gemm.low_rank import LowRank, fill_ranks
from model_worker.cpu.gemm.products import add_product, gated, halves_of
from model_worker.cpu.gemm.weight_format import HALF
from model_worker.cpu.simd.elements import INSIDE, MATH, element

Q, K, V, O, GATE, UP, DOWN = range(7)  # noqa: E741 - the field's names
BEFORE_ATTENTION, BEFORE_MLP = range(2)

# The phases named RANKS compute the inner products of adapters; without adapters they have no pieces.
NORM, QKV_RANKS, QKV, PLACE, OUT_RANKS, OUT, MLP_NORM, INNER_RANKS, INNER, MLP_OUT_RANKS, MLP_OUT, PARTS = range(12)
RANKS_PARTS = QKV_RANKS, OUT_RANKS, INNER_RANKS, MLP_OUT_RANKS


class Weights(NamedTuple):
    """The weights of the model. Arrays begin with the layer."""

    panels: NDArray[np.int64]  # [L, 7] addresses of packed weights
    # [L, 4]: by the operand, in the order of RANKS_PARTS, the address of the order in which panels have its inputs; 0:
    # as they come
    orders: NDArray[np.int64]
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


class Adapters(NamedTuple):
    """The adapters of a pass, as low_rank.py knows them. Its tables begin with the adapter, and end with lm_head's
    layer."""

    slots: NDArray[np.int64]  # [T]: index of each token's adapter, -1: none. Or nothing: no token has one
    inputs: NDArray[np.int64]  # [S, L + 1, 4, INPUT_COLUMNS]: by the operand, in the order of RANKS_PARTS
    outputs: NDArray[np.int64]  # [S, L + 1, 7, OUTPUT_COLUMNS]
    blocks: NDArray[np.int64]  # [5]: the most blocks of any adapter by operand, lm_head's at the end
    ranks: NDArray[np.float32]  # [B, ranks of the most blocks]
    like: NDArray[Any]  # any array of the element type of A and B
    embedding_slots: NDArray[np.int64]  # [T], or nothing: no adapter changes embeddings
    embeddings: NDArray[np.int64]  # [S, EMBEDDING_COLUMNS]
    head_slots: NDArray[np.int64]  # [L]: of the tokens whose logits are needed, or nothing: none has a head of its own
    head_ranks: NDArray[np.float32]  # [L, ranks of lm_head]


class Levels(NamedTuple):
    """What is added to the residual behind the first layers (DeepStack)."""

    rows: NDArray[np.int64]  # [T]: the row of each token in `vectors`, -1: none. Or nothing: no token has one
    vectors: NDArray[np.float32]  # [K, layers, hidden]


class Residuals(NamedTuple):
    """Copies of the residual as it enters some layers; a drafter reads them."""

    places: NDArray[np.int64]  # [L + 1]: by the layer, its place in `vectors`, -1: not kept. Or nothing: none is kept
    vectors: NDArray[np.float32]  # [T, kept layers, hidden]


def levels_from(embeddings: tuple[Tensor, Tensor] | None, tokens: int, hidden: int) -> Levels:
    """Return the levels of a pass of so many tokens. `embeddings` are those of a ForwardBatch."""
    if embeddings is None or embeddings[1].shape[1] == hidden:
        return Levels(np.empty(0, np.int64), np.empty((0, 0, 0), np.float32))
    places, vectors = embeddings
    rows = np.full(tokens, -1)
    rows[places.numpy()] = np.arange(len(places))
    return Levels(rows, vectors[:, hidden:].contiguous().view(len(vectors), -1, hidden).numpy())


@njit(nogil=True, cache=True, **INSIDE)
def adapters_of(adapters: Any, layer: int, part: int, first: int, count: int, at: int) -> Any:
    """Return the adapters of a block at one linear layer: its first token, its length, its first row in the buffer."""
    slots = adapters.slots[first : first + count]
    return LowRank(slots, adapters.ranks[at : at + count], adapters.outputs[:, layer, part], adapters.like)


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
def _project(layer: int, block: Any, taken: Any, operand: Any, out: Any, work: Any, own: Any) -> None:
    """Multiply by some halves of panels of Q's, K's and V's weights, which lie anywhere, but are counted as if in a
    row."""
    first_token, count, at = block
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
            added = adapters_of(work.adapters, layer, part, first_token, count, at)
            formats = own.weight_format
            add_product(own.core, some, operand, weights, width, out, column, biases, layer, formats, own.tile, added)
        start = start + halves
        column = column + width


@njit(nogil=True, cache=True, **INSIDE)
def _fill(adapters: Any, layer: int, number: int, block: Any, taken: Any, operand: Any) -> None:
    """Compute the inner products of a block's adapters with operand `number`."""
    first, count, at = block
    slots = adapters.slots[first : first + count]
    table = adapters.inputs[:, layer, number]
    fill_ranks(taken, operand, slots, table, adapters.like, adapters.ranks[at : at + count])


@njit(nogil=True, cache=True, **INSIDE)
def _add_level(layer: int, block: Any, taken: Any, rows: Any, levels: Any) -> None:
    """Add what stands behind a layer to a block's residual, in the columns of some halves of a product's panels."""
    if len(levels.rows) == 0 or layer >= levels.vectors.shape[1]:
        return
    first = taken[0] * HALF
    end = min((taken[0] + taken[1]) * HALF, rows.shape[1])
    for row in range(block[1]):
        number = levels.rows[block[0] + row]
        if number >= 0:
            to = rows[row]
            vector = levels.vectors[number, layer]
            for c in range(first, end):
                to[c] += vector[c]


@njit(nogil=True, cache=True, **INSIDE)
def keep_residual(layer: int, first_row: int, rows: Any, first: int, end: int, residuals: Any) -> None:
    """Copy the columns `first` to `end` of some tokens' residual, as it enters a layer, if that is kept."""
    if len(residuals.places) == 0 or residuals.places[layer] < 0:
        return
    place = residuals.places[layer]
    for row in range(len(rows)):
        values = rows[row]
        to = residuals.vectors[first_row + row, place]
        for c in range(first, end):
            to[c] = values[c]


@njit(nogil=True, cache=True, **INSIDE)
def pieces_in(part: int, tokens: int, work: Any) -> Any:
    """Return the number of pieces into which a phase is cut for `tokens` tokens."""
    if part in (NORM, MLP_NORM) or tokens == 0:
        return tokens
    for operand in range(len(RANKS_PARTS)):
        if part == RANKS_PARTS[operand]:
            return tokens * work.adapters.blocks[operand]
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
    adapters = work.adapters
    if part in (NORM, MLP_NORM):
        norm = weights.norms[layer, BEFORE_ATTENTION if part == NORM else BEFORE_MLP]
        for row in range(taken[0], taken[0] + taken[1]):
            normalise(rows, row, norm, weights.epsilon, hidden, row)
    elif part == QKV_RANKS:
        _fill(adapters, layer, 0, block, taken, hidden)
    elif part == QKV:
        if fresh:
            own.weight_format.prepare_in_order(hidden, weights.orders[layer, 0])
        _project(layer, block, taken, hidden, buffers.qkv[at : at + count], work, own)
    elif part == PLACE:
        rotate_and_write_kv(layer, block, taken, work)
    elif part == OUT_RANKS:
        _fill(adapters, layer, 1, block, taken, heads[first : first + count])
    elif part == OUT:
        operand = heads[first : first + count]
        out = panels[layer, O]
        biases = weights.biases
        if fresh:
            own.weight_format.prepare_in_order(operand, weights.orders[layer, 1])
        added = adapters_of(adapters, layer, O, first, count, at)
        add_product(core, taken, operand, out, x.shape[1], rows, 0, biases, -1, own.weight_format, tile, added)
    elif part == INNER_RANKS:
        _fill(adapters, layer, 2, block, taken, hidden)
    elif part == INNER:
        gate = panels[layer, GATE]
        up = panels[layer, UP]
        width = weights.mlp_width
        if fresh:
            own.weight_format.prepare_in_order(hidden, weights.orders[layer, 2])
        to_gate = adapters_of(adapters, layer, GATE, first, count, at)
        to_up = adapters_of(adapters, layer, UP, first, count, at)
        gated(core, taken, hidden, gate, up, width, inner, own.weight_format, tile, own.other, to_gate, to_up)
    elif part == MLP_OUT_RANKS:
        _fill(adapters, layer, 3, block, taken, inner)
    else:
        down = panels[layer, DOWN]
        biases = weights.biases
        if fresh:
            own.weight_format.prepare_in_order(inner, weights.orders[layer, 3])
        added = adapters_of(adapters, layer, DOWN, first, count, at)
        add_product(core, taken, inner, down, x.shape[1], rows, 0, biases, -1, own.weight_format, tile, added)
        _add_level(layer, block, taken, rows, work.levels)
        columns = min((taken[0] + taken[1]) * HALF, x.shape[1])
        keep_residual(layer + 1, first, rows, taken[0] * HALF, columns, work.residuals)


@njit(nogil=True, cache=True, **INSIDE)
def every(pieces: int) -> Any:
    """Return all pieces: the first, and their number. (A tuple of a literal would have its callees compiled once
    more.)"""
    return np.int64(0), np.int64(pieces)
