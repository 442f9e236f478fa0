"""A whole stack of decoder layers in one compiled call, from embeddings to logits.

Knows arrays: packed weights by address, as linears.py lays them out, and the paged cache as cpu_kernel.py reads it. The
residual and all sums are float32; what goes into a product is rounded to the weights' dtype first. Every phase is
shared out to the cores of a team, and ends where all of them meet. Indices are not checked: what is out of place here
corrupts memory. Does not know which models have this form (stack.py does).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numba import njit
from numpy.typing import NDArray

from model_worker.fusion.attention import attend, key_group, value_group
from model_worker.fusion.elements import element, pointer
from model_worker.fusion.largest import agree
from model_worker.fusion.products import LANE_BYTES, PANEL, add_product, gated, pick_product, room_of
from model_worker.fusion.team import meet
from model_worker.fusion.tile import TILE_ROWS

_numba: Any = numba
carray = _numba.carray

_MATH = {"reassoc", "contract", "arcp", "nsz"}
Q, K, V, O, GATE, UP, DOWN = range(7)  # noqa: E741 - the field's names
BEFORE_ATTENTION, BEFORE_MLP = range(2)


class Weights(NamedTuple):
    """What the model is made of. Arrays begin with the layer."""

    panels: NDArray[np.int64]  # [L, 7] addresses of packed weights
    biases: NDArray[np.float32]  # [L, q + k + v outputs]
    norms: NDArray[np.float32]  # [L, 2, hidden]
    head_norms: NDArray[np.float32]  # [L, 2, head_dim] of Q and K, or [L, 2, 0]
    final_norm: NDArray[np.float32]  # [hidden]
    head: int  # address of lm_head's panels
    mlp_width: int
    epsilon: np.float32


class Rotary(NamedTuple):
    """Angles of rotary positions, and which of them each token has."""

    cos: NDArray[np.float32]  # [n, rotated elements]
    sin: NDArray[np.float32]
    rows: NDArray[np.int64]  # [T]


class Buffers(NamedTuple):
    """Room for T tokens. The operands of products are as wide as panels have steps, and zero beyond their contents."""

    hidden: NDArray[Any]  # operand [T, >= hidden]
    qkv: NDArray[np.float32]  # [T, q + k + v outputs]
    q: NDArray[Any]  # operand [T, heads, head_dim]
    heads: NDArray[Any]  # operand [T, >= heads * v's head_dim]
    inner: NDArray[Any]  # operand [T, >= mlp_width]


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def _normalise(x: Any, row: int, weight: Any, epsilon: Any, out: Any, to: int) -> None:
    total, values, normed = np.float32(0.0), x[row], out[to]
    for c in range(len(weight)):
        total += values[c] * values[c]
    share = np.float32(1.0) / np.sqrt(total / np.float32(len(weight)) + epsilon)
    for c in range(len(weight)):
        normed[c] = element(values[c] * share * weight[c], out)


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def _normalise_head(head: Any, weight: Any, epsilon: Any) -> None:
    total = np.float32(0.0)
    for d in range(len(weight)):
        total += head[d] * head[d]
    share = np.float32(1.0) / np.sqrt(total / np.float32(len(weight)) + epsilon)
    for d in range(len(weight)):
        head[d] *= share * weight[d]


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def _rotate(head: Any, cos: Any, sin: Any) -> None:
    """Rotate the first elements: element d with element d + half."""
    half = len(cos) // 2
    low, high = head[:half], head[half : 2 * half]
    cos_low, cos_high, sin_low, sin_high = cos[:half], cos[half:], sin[:half], sin[half:]
    for d in range(half):
        a, b = low[d], high[d]
        low[d] = a * cos_low[d] - b * sin_low[d]
        high[d] = b * cos_high[d] + a * sin_high[d]


@njit(nogil=True, cache=True)
def _keep_key(cache: Any, layer: int, head: int, block: int, offset: int, values: Any) -> None:
    """Put one token's K where cache_tile.py expects it."""
    part, dim, size = LANE_BYTES // cache.like.itemsize, cache.k_dim, cache.block_size
    memory = carray(pointer(key_group(cache, layer, head, block, 0)), (dim * size,), cache.like.dtype)
    for d in range(dim):
        memory[((d // part) * size + offset) * part + d % part] = element(values[d], memory)


@njit(nogil=True, cache=True)
def _keep_value(cache: Any, layer: int, head: int, block: int, offset: int, values: Any, unused: int) -> None:
    """Put one token's V there, and zeros after it: their weight is 0, but 0 times what is no number is no number."""
    part, dim, size = LANE_BYTES // cache.like.itemsize, cache.v_dim, cache.block_size
    memory = carray(pointer(value_group(cache, layer, head, block, 0)), (dim * size,), cache.like.dtype)
    for d in range(dim):
        memory[((offset // part) * dim + d) * part + offset % part] = element(values[d], memory)
    for after in range(offset + 1, offset + 1 + unused):
        for d in range(dim):
            memory[((after // part) * dim + d) * part + after % part] = element(np.float32(0.0), memory)


@njit(nogil=True, cache=True)
def _place(layer: int, row: int, qkv: Any, rotary: Any, head_norms: Any, epsilon: Any, q: Any, cache: Any) -> None:
    """Turn one token's projections: Q into `q`, K and V into its slot of the cache."""
    block, offset, angle = cache.blocks[row], cache.offsets[row], rotary.rows[row]
    cos, sin = rotary.cos[angle], rotary.sin[angle]
    heads, dim, v_dim = q.shape[1], q.shape[2], cache.v_dim
    values = qkv[row, (heads + cache.kv_heads) * dim :]
    for head in range(heads + cache.kv_heads):
        part = qkv[row, head * dim : (head + 1) * dim]
        if head_norms.shape[1]:
            _normalise_head(part, head_norms[0 if head < heads else 1], epsilon)
        _rotate(part, cos, sin)
        if head < heads:
            to = q[row, head]
            for d in range(dim):
                to[d] = element(part[d], q)
        else:
            kv = head - heads
            _keep_key(cache, layer, kv, block, offset, part)
            value = values[kv * v_dim : (kv + 1) * v_dim]
            _keep_value(cache, layer, kv, block, offset, value, cache.unused[row])


@njit(nogil=True, cache=True)
def run_stack(
    core: int,
    cores: int,
    counter: Any,
    x: Any,
    rotary: Any,
    weights: Any,
    cache: Any,
    attention: Any,
    buffers: Any,
    rooms: Any,
    logit_rows: Any,
    wanted: Any,
    logits: Any,
    keys: Any,
    places: Any,
    tokens: Any,
) -> None:
    """One core's part of a forward pass: x [T, hidden] holds the embeddings, and the residual afterwards.

    `logit_rows` are the tokens whose logits count; `wanted` to `places` are what `pick_product` makes of them, and
    `tokens` what comes of that.
    `rooms` is None, or for int8 weights uint32 [cores, 2, steps of the widest operand, PANEL].
    """
    rows, meeting, claimed = x.shape[0], 0, 0
    first, end = rows * core // cores, rows * (core + 1) // cores
    tile, other = np.empty((TILE_ROWS, PANEL), np.float32), np.empty((TILE_ROWS, PANEL), np.float32)
    hidden, qkv, q, inner = buffers.hidden, buffers.qkv, buffers.q, buffers.inner
    q_width, no_bias = q.shape[1] * q.shape[2], weights.final_norm[:0]
    own, room = room_of(rooms, core), room_of(room_of(rooms, core), 0)
    k_width, v_width = cache.kv_heads * cache.k_dim, cache.kv_heads * cache.v_dim
    for layer in range(len(weights.panels)):
        panels, bias = weights.panels[layer], weights.biases[layer]
        for row in range(first, end):
            _normalise(x, row, weights.norms[layer, BEFORE_ATTENTION], weights.epsilon, hidden, row)
        meeting = meet(counter, cores, meeting)
        add_product(core, cores, hidden, panels[Q], q_width, qkv, 0, bias, room, tile)
        add_product(core, cores, hidden, panels[K], k_width, qkv, q_width, bias, room, tile)
        add_product(core, cores, hidden, panels[V], v_width, qkv, q_width + k_width, bias, room, tile)
        meeting = meet(counter, cores, meeting)
        for row in range(first, end):
            _place(layer, row, qkv, rotary, weights.head_norms[layer], weights.epsilon, q, cache)
        meeting = meet(counter, cores, meeting)
        claimed = attend(counter, claimed, cores, layer, q, cache, attention, buffers.heads)
        meeting = meet(counter, cores, meeting)
        add_product(core, cores, buffers.heads, panels[O], x.shape[1], x, 0, no_bias, room, tile)
        meeting = meet(counter, cores, meeting)
        for row in range(first, end):
            _normalise(x, row, weights.norms[layer, BEFORE_MLP], weights.epsilon, hidden, row)
        meeting = meet(counter, cores, meeting)
        width = weights.mlp_width
        claimed = gated(counter, claimed, cores, hidden, panels[GATE], panels[UP], width, inner, own, tile, other)
        meeting = meet(counter, cores, meeting)
        add_product(core, cores, inner, panels[DOWN], x.shape[1], x, 0, no_bias, room, tile)
        meeting = meet(counter, cores, meeting)
    count = len(logit_rows)
    for i in range(count * core // cores, count * (core + 1) // cores):
        _normalise(x, logit_rows[i], weights.final_norm, weights.epsilon, hidden, i)
    meeting = meet(counter, cores, meeting)
    pick_product(counter, claimed, hidden, weights.head, wanted, logits, keys[core], places[core], room, tile)
    meet(counter, cores, meeting)
    if core == 0:
        agree(keys, places, tokens)
