"""A whole stack of decoder layers in one compiled call, from embeddings to logits.

Knows arrays: packed weights by address, as linears.py lays them out, and the paged cache as cpu_kernel.py reads it. The
residual and all sums are float32; what goes into a product is rounded to the weights' dtype first. A pass is a row of
phases; each is cut into pieces that the cores of a team take, and those that are over at once are left to one core.
Indices are not checked: what is out of place here corrupts memory. Does not know which models have this form (stack.py
does).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numba import njit
from numpy.typing import NDArray

from model_worker.fusion.attention import attend, attention_room, key_group, value_group
from model_worker.fusion.elements import element, pointer, widened
from model_worker.fusion.largest import agree
from model_worker.fusion.products import (
    HALVES,
    HEAD_PANELS,
    LANE_BYTES,
    PANEL,
    add_product,
    gated,
    halves_of,
    pick_product,
    room_of,
)
from model_worker.fusion.screen import choose, screen
from model_worker.fusion.team import begin, phase_of, take, wait, was_last
from model_worker.fusion.tile import TILE_ROWS

_numba: Any = numba
carray = _numba.carray

_MATH = {"reassoc", "contract", "arcp", "nsz"}
Q, K, V, O, GATE, UP, DOWN = range(7)  # noqa: E741 - the field's names
BEFORE_ATTENTION, BEFORE_MLP = range(2)

# A pass is BEGIN, those of each layer, and those of the end.
NORM, QKV, PLACE, ATTEND, OUT, MLP_NORM, INNER, MLP_OUT, LAYER_PHASES = range(9)
FINAL_NORM, SCREEN, CHOOSE, HEAD, AGREE, BEGIN, KINDS = range(LAYER_PHASES, LAYER_PHASES + 7)
GRAIN_ROWS = 4
"""Of work that is done token by token."""
FEW_ROWS = 2
"""So many tokens are dealt with sooner than another core hears of them."""


class Inputs(NamedTuple):
    """The tokens of a pass. Those of rows whose last token another pass draws are read when this one begins."""

    tokens: NDArray[np.int64]  # [T], or nothing if x holds the embeddings already
    rows: NDArray[np.int64]  # [T]: whose last token stands for this one; -1: nobody's
    last_tokens: NDArray[np.int64]  # [rows]
    table: NDArray[Any]  # [vocabulary, hidden]: embeddings


class Outputs(NamedTuple):
    """What a pass makes; `wanted` to `tokens` are as `pick_product` and `agree` know them."""

    logit_rows: NDArray[np.int64]  # [L]: tokens whose logits count
    wanted: NDArray[np.int64]  # [L]
    logits: NDArray[np.float32]
    keys: NDArray[np.int32]  # [cores, L]
    places: NDArray[np.int64]  # [cores, L]
    tokens: NDArray[np.int64]  # [L]
    rows: NDArray[np.int64]  # [L]: whose last token this will be; -1: nobody's
    last_tokens: NDArray[np.int64]  # [rows]
    peaks: NDArray[np.int32]  # [L, panels of lm_head], as screen.py knows them, or nothing: not screened
    panels: NDArray[np.int64]  # [1 + panels]: how many of lm_head's panels are multiplied, and which


class Weights(NamedTuple):
    """What the model is made of. Arrays begin with the layer."""

    panels: NDArray[np.int64]  # [L, 7] addresses of packed weights
    biases: NDArray[np.float32]  # [L, q + k + v outputs]
    norms: NDArray[np.float32]  # [L, 2, hidden]
    head_norms: NDArray[np.float32]  # [L, 2, head_dim] of Q and K, or [L, 2, 0]
    final_norm: NDArray[np.float32]  # [hidden]
    head: int  # address of lm_head's panels
    screen: int  # address of its int8 copy's, as screen.py knows it, or 0
    bounds: NDArray[np.float32]  # [panels of lm_head], or nothing
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
def _embed(row: int, inputs: Any, x: Any) -> None:
    """The embedding of one token, widened."""
    token = inputs.tokens[row] if inputs.rows[row] < 0 else max(0, inputs.last_tokens[inputs.rows[row]])
    vector, to = inputs.table[token], x[row]
    for c in range(len(to)):
        to[c] = widened(vector[c])


@njit(nogil=True, cache=True)
def _kind(phase: int, layers: int) -> Any:
    """What is done in a phase, and in which layer."""
    if phase == 0:
        return BEGIN, 0
    if phase <= layers * LAYER_PHASES:
        return (phase - 1) % LAYER_PHASES, (phase - 1) // LAYER_PHASES
    return phase - 1 - layers * LAYER_PHASES + FINAL_NORM, 0


@njit(nogil=True, cache=True)
def _by_rows(kind: int) -> bool:
    """Whether a phase's pieces are tokens."""
    return kind in (BEGIN, NORM, PLACE, MLP_NORM, FINAL_NORM)


@njit(nogil=True, cache=True)
def _sizes(x: Any, weights: Any, cache: Any, attention: Any, buffers: Any, outputs: Any) -> Any:
    """[kind, 2]: how many pieces a phase has, and how many of them are a grain."""
    rows, wanted = x.shape[0], len(outputs.logit_rows)
    k_width, v_width = cache.kv_heads * cache.k_dim, cache.kv_heads * cache.v_dim
    sizes = np.zeros((KINDS, 2), np.int64)
    sizes[:, 0], sizes[:, 1] = rows, GRAIN_ROWS
    sizes[QKV, 0] = halves_of(buffers.q.shape[1] * buffers.q.shape[2]) + halves_of(k_width) + halves_of(v_width)
    sizes[OUT, 0] = sizes[MLP_OUT, 0] = halves_of(x.shape[1])
    sizes[INNER, 0] = halves_of(weights.mlp_width)
    sizes[QKV, 1] = sizes[OUT, 1] = sizes[MLP_OUT, 1] = sizes[INNER, 1] = HALVES
    sizes[ATTEND, 0], sizes[ATTEND, 1] = len(attention.units), 1
    sizes[FINAL_NORM, 0] = wanted
    sizes[SCREEN, 0], sizes[CHOOSE, 0], sizes[AGREE, 0] = outputs.peaks.size // max(wanted, 1), 0, 0
    sizes[HEAD, 0] = len(outputs.panels) - 1 if wanted else 0
    sizes[SCREEN, 1] = sizes[HEAD, 1] = HEAD_PANELS
    return sizes


@njit(nogil=True, cache=True)
def _do_rows(
    kind: int,
    layer: int,
    taken: Any,
    inputs: Any,
    x: Any,
    rotary: Any,
    weights: Any,
    cache: Any,
    buffers: Any,
    outputs: Any,
) -> None:
    """The part of a phase for some tokens: the first, and how many."""
    first, count = taken
    if kind == BEGIN:
        for row in range(first, first + count if len(inputs.tokens) else first):
            _embed(row, inputs, x)
    elif kind == PLACE:
        for row in range(first, first + count):
            _place(layer, row, buffers.qkv, rotary, weights.head_norms[layer], weights.epsilon, buffers.q, cache)
    elif kind == FINAL_NORM:
        for row in range(first, first + count):
            _normalise(x, outputs.logit_rows[row], weights.final_norm, weights.epsilon, buffers.hidden, row)
    else:
        norm = weights.norms[layer, BEFORE_ATTENTION if kind == NORM else BEFORE_MLP]
        for row in range(first, first + count):
            _normalise(x, row, norm, weights.epsilon, buffers.hidden, row)


@njit(nogil=True, cache=True)
def _project(
    core: int,
    taken: Any,
    operand: Any,
    panels: Any,
    widths: Any,
    out: Any,
    biases: Any,
    layer: int,
    room: Any,
    tile: Any,
) -> None:
    """Some halves of panels of Q's, K's and V's weights, which lie anywhere, but are counted as if in a row."""
    start = column = 0
    for part in range(V + 1):
        halves = halves_of(widths[part])
        first, end = max(taken[0] - start, 0), min(taken[0] + taken[1] - start, halves)
        if first < end:
            weights, width = panels[layer, part], widths[part]
            add_product(core, (first, end - first), operand, weights, width, out, column, biases, layer, room, tile)
        start, column = start + halves, column + widths[part]


@njit(nogil=True, cache=True)
def _agree(outputs: Any) -> None:
    """The largest tokens, also as the last ones of their rows."""
    agree(outputs.keys, outputs.places, outputs.tokens)
    for row in range(len(outputs.rows)):
        if outputs.rows[row] >= 0:
            outputs.last_tokens[outputs.rows[row]] = outputs.tokens[row]


@njit(nogil=True, cache=True)
def run_stack(
    core: int,
    counter: Any,
    inputs: Any,
    x: Any,
    rotary: Any,
    weights: Any,
    cache: Any,
    attention: Any,
    buffers: Any,
    outputs: Any,
    rooms: Any,
) -> None:
    """One core's part of a forward pass: x [T, hidden] is the residual, from the embeddings on.

    `rooms` is None, or for int8 weights uint32 [cores, 2, steps of the widest operand, PANEL].
    """
    layers, cores = len(weights.panels), len(outputs.keys)
    end = layers * LAYER_PHASES + KINDS - LAYER_PHASES
    tile, other = np.empty((TILE_ROWS, PANEL), np.float32), np.empty((TILE_ROWS, PANEL), np.float32)
    bits, own = tile.view(np.int32), attention_room(buffers.q, cache, attention)
    room, up_room = room_of(room_of(rooms, core), 0), room_of(room_of(rooms, core), 1)
    sizes = _sizes(x, weights, cache, attention, buffers, outputs)
    hidden, heads, inner, q, qkv = buffers.hidden, buffers.heads, buffers.inner, buffers.q, buffers.qkv
    widths = (q.shape[1] * q.shape[2], cache.kv_heads * cache.k_dim, cache.kv_heads * cache.v_dim)
    wanted, logits, keys, places = outputs.wanted, outputs.logits, outputs.keys[core], outputs.places[core]
    panels, biases = weights.panels, weights.biases
    phase = phase_of(counter)
    while phase < end:
        kind, layer = _kind(phase, layers)
        pieces, grain, done = sizes[kind, 0] if kind != HEAD else outputs.panels[0], sizes[kind, 1], 0
        taken = take(counter, phase, pieces, grain, core, cores)
        while taken[1] > 0:
            if kind == QKV:
                _project(core, taken, hidden, panels, widths, qkv, biases, layer, room, tile)
            elif kind == ATTEND:
                attend(layer, taken, q, cache, attention, own, heads)
            elif kind == OUT:
                add_product(core, taken, heads, panels[layer, O], x.shape[1], x, 0, biases, -1, room, tile)
            elif kind == INNER:
                gate, up, width = panels[layer, GATE], panels[layer, UP], weights.mlp_width
                gated(core, taken, hidden, gate, up, width, inner, room, up_room, tile, other)
            elif kind == MLP_OUT:
                add_product(core, taken, inner, panels[layer, DOWN], x.shape[1], x, 0, biases, -1, room, tile)
            elif kind == SCREEN:
                screen(taken, hidden, weights.screen, logits.shape[1], outputs.peaks, tile, bits)
            elif kind == HEAD:
                numbers = outputs.panels[1 : 1 + pieces]
                pick_product(taken, numbers, hidden, weights.head, wanted, logits, keys, places, room, tile, bits)
            else:
                _do_rows(kind, layer, taken, inputs, x, rotary, weights, cache, buffers, outputs)
            done += taken[1]
            taken = take(counter, phase, pieces, grain, core, cores)
        if done > 0 and was_last(counter, done, pieces):
            phase += 1
            kind, layer = _kind(phase, layers)
            # What is over at once is not worth telling the others of.
            while phase < end and (sizes[kind, 0] == 0 or (_by_rows(kind) and sizes[kind, 0] <= FEW_ROWS)):
                if kind == AGREE:
                    _agree(outputs)
                elif kind == CHOOSE and outputs.peaks.size > 0:
                    choose(hidden, weights.bounds, outputs.peaks, outputs.panels)
                elif sizes[kind, 0] > 0:
                    _do_rows(kind, layer, (0, sizes[kind, 0]), inputs, x, rotary, weights, cache, buffers, outputs)
                phase += 1
                kind, layer = _kind(phase, layers)
            begin(counter, phase)
        else:
            wait(counter, phase)
        phase = phase_of(counter)
