"""A whole stack of decoder layers in one compiled call, from embeddings to logits.

Knows arrays: packed weights by address, as linears.py lays them out, and the paged cache as cpu_kernel.py reads it. The
residual and all sums are float32; what goes into a product is rounded to the weights' dtype first. Every phase is
shared out to the cores of a team, and ends where all of them meet. Indices are not checked: what is out of place here
corrupts memory. Does not know which models have this form (stack.py does).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numba.extending
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numpy.typing import NDArray

from model_worker.attention.cpu_kernel import _exp, run_core
from model_worker.fusion.team import meet
from model_worker.fusion.tile import TILE_ROWS, multiply_half_panel, multiply_panel

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic
_numba: Any = numba
carray = _numba.carray

_MATH = {"reassoc", "contract", "arcp", "nsz"}
PANEL, HALF, LANE_BYTES = 64, 32, 4
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


class Cache(NamedTuple):
    """The KV cache, and where this step's tokens go."""

    k: NDArray[np.int64]  # [L] addresses of arrays like `k_like`
    v: NDArray[np.int64]
    k_like: NDArray[Any]  # [block, kv_head, offset, element]
    v_like: NDArray[Any]
    blocks: NDArray[np.int64]  # [T]
    offsets: NDArray[np.int64]  # [T]


class Attention(NamedTuple):
    """How the batch attends: the plan of cpu.py, and each layer's scale and window."""

    tables: NDArray[np.int32]
    tiles: NDArray[np.int64]
    units: NDArray[np.int64]
    bounds: NDArray[np.int64]
    scales: NDArray[np.float32]  # [L]
    windows: NDArray[np.int64]  # [L]
    no_sinks: NDArray[np.float32]


class Buffers(NamedTuple):
    """Room for T tokens. The operands of products are as wide as panels have steps, and zero beyond their contents."""

    hidden: NDArray[Any]  # operand [T, >= hidden]
    qkv: NDArray[np.float32]  # [T, q + k + v outputs]
    q: NDArray[np.float32]  # [T, heads, head_dim]
    mixed: NDArray[np.float32]  # [T, heads, v's head_dim]
    heads: NDArray[Any]  # operand [T, >= heads * v's head_dim]
    inner: NDArray[Any]  # operand [T, >= mlp_width]


@intrinsic
def _element(typing: Any, value: Any, like: Any) -> Any:
    """A float32 as an element of the array `like`: itself, or the bits of the nearest bfloat16 (even among two)."""

    def bfloat16(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        sixteen, one = ir.Constant(word, 16), ir.Constant(word, 1)
        odd = builder.and_(builder.lshr(bits, sixteen), one)
        # A NaN stays one: those that arithmetic makes have no bits set that this sum could carry over.
        rounded = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
        return builder.trunc(builder.lshr(rounded, sixteen), ir.IntType(16))

    def float32(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0]

    return like.dtype(types.float32, like), bfloat16 if like.dtype == types.uint16 else float32


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@njit(nogil=True, cache=True)
def _panel_address(operand: Any, panels: int, unit: int) -> Any:
    """Where half panel number `unit` begins, of weights with as many steps as the operand has."""
    steps = operand.shape[1] * operand.itemsize // LANE_BYTES
    return panels + (unit // 2) * steps * PANEL * LANE_BYTES + (unit % 2) * HALF * LANE_BYTES


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def _project(
    core: int, cores: int, operand: Any, rows: int, panels: int, width: int, out: Any, column: int, bias: Any, tile: Any
) -> None:
    """out[:, column : column + width] = operand . weights + bias, or += where there is no bias to add.

    Each core takes a run of half panels, and so reads its part of the weights once.
    """
    halves = -(-width // HALF)
    unit, end = halves * core // cores, halves * (core + 1) // cores
    pieces = -(-rows // TILE_ROWS)
    while unit < end:
        whole = unit % 2 == 0 and unit + 1 < end
        address = _panel_address(operand, panels, unit)
        lanes = min(PANEL if whole else HALF, width - unit * HALF)
        at = column + unit * HALF
        for piece in range(pieces):
            first = rows * piece // pieces
            count = rows * (piece + 1) // pieces - first
            if whole:
                multiply_panel(operand, first, count, address, tile)
            else:
                multiply_half_panel(operand, first, count, address, tile)
            for r in range(count):
                to, sums = out[first + r, at : at + lanes], tile[r]
                if len(bias):
                    added = bias[at : at + lanes]
                    for lane in range(len(to)):
                        to[lane] = sums[lane] + added[lane]
                else:
                    for lane in range(len(to)):
                        to[lane] += sums[lane]
        unit += 2 if whole else 1


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def _logits(core: int, cores: int, operand: Any, rows: int, panels: int, out: Any, tile: Any) -> None:
    """out = operand . weights."""
    width = out.shape[1]
    count = -(-width // PANEL)
    pieces = -(-rows // TILE_ROWS)
    for unit in range(count * core // cores, count * (core + 1) // cores):
        address = _panel_address(operand, panels, 2 * unit)
        at = unit * PANEL
        for piece in range(pieces):
            first = rows * piece // pieces
            height = rows * (piece + 1) // pieces - first
            multiply_panel(operand, first, height, address, tile)
            for r in range(height):
                to, sums = out[first + r, at : at + PANEL], tile[r]
                for lane in range(len(to)):
                    to[lane] = sums[lane]


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def _gated(
    core: int, cores: int, operand: Any, rows: int, gate: int, up: int, width: int, out: Any, tile: Any, other: Any
) -> None:
    """out = silu(operand . gate) * (operand . up), as the operand of the next product."""
    halves = -(-width // HALF)
    unit, end = halves * core // cores, halves * (core + 1) // cores
    pieces = -(-rows // TILE_ROWS)
    one = np.float32(1.0)
    while unit < end:
        whole = unit % 2 == 0 and unit + 1 < end
        at = unit * HALF
        lanes = min(PANEL if whole else HALF, width - at)
        for piece in range(pieces):
            first = rows * piece // pieces
            count = rows * (piece + 1) // pieces - first
            if whole:
                multiply_panel(operand, first, count, _panel_address(operand, gate, unit), tile)
                multiply_panel(operand, first, count, _panel_address(operand, up, unit), other)
            else:
                multiply_half_panel(operand, first, count, _panel_address(operand, gate, unit), tile)
                multiply_half_panel(operand, first, count, _panel_address(operand, up, unit), other)
            for r in range(count):
                to, gates, values = out[first + r, at : at + lanes], tile[r], other[r]
                for lane in range(len(to)):
                    x = gates[lane]
                    to[lane] = _element(x / (one + _exp(-x)) * values[lane], out)
        unit += 2 if whole else 1


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def _normalise(x: Any, row: int, weight: Any, epsilon: Any, out: Any, to: int) -> None:
    total, values, normed = np.float32(0.0), x[row], out[to]
    for c in range(len(weight)):
        total += values[c] * values[c]
    share = np.float32(1.0) / np.sqrt(total / np.float32(len(weight)) + epsilon)
    for c in range(len(weight)):
        normed[c] = _element(values[c] * share * weight[c], out)


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def _normalise_head(head: Any, weight: Any, epsilon: Any) -> None:
    total = np.float32(0.0)
    for d in range(len(weight)):
        total += head[d] * head[d]
    share = np.float32(1.0) / np.sqrt(total / np.float32(len(weight)) + epsilon)
    for d in range(len(weight)):
        head[d] *= share * weight[d]


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def _rotate(head: Any, cos: Any, sin: Any, to: Any) -> None:
    """Write a head to `to`, its first elements rotated: element d with element d + half."""
    half = len(cos) // 2
    low, high, to_low, to_high = head[:half], head[half : 2 * half], to[:half], to[half : 2 * half]
    cos_low, cos_high, sin_low, sin_high = cos[:half], cos[half:], sin[:half], sin[half:]
    for d in range(half):
        to_low[d] = _element(low[d] * cos_low[d] - high[d] * sin_low[d], to)
        to_high[d] = _element(high[d] * cos_high[d] + low[d] * sin_high[d], to)
    for d in range(2 * half, len(head)):
        to[d] = _element(head[d], to)


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def _place(
    row: int, qkv: Any, cos: Any, sin: Any, head_norms: Any, epsilon: Any, q: Any, k: Any, v: Any, to: Any
) -> None:
    """Turn one token's projections: Q into `q`, K and V into the slot `to` of the cache."""
    block, offset = to
    heads, dim, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    for head in range(heads):
        part = qkv[row, head * dim : (head + 1) * dim]
        if head_norms.shape[1]:
            _normalise_head(part, head_norms[0], epsilon)
        _rotate(part, cos, sin, q[row, head])
    for head in range(kv_heads):
        part = qkv[row, (heads + head) * dim : (heads + head + 1) * dim]
        if head_norms.shape[1]:
            _normalise_head(part, head_norms[1], epsilon)
        _rotate(part, cos, sin, k[block, head, offset])
    values = qkv[row, (heads + kv_heads) * dim :]
    for head in range(kv_heads):
        part, slot = values[head * v.shape[3] : (head + 1) * v.shape[3]], v[block, head, offset]
        for d in range(len(slot)):
            slot[d] = _element(part[d], v)


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def _attend(core: int, layer: int, q: Any, k: Any, v: Any, attention: Any, out: Any) -> None:
    if core < len(attention.bounds) - 1:
        run_core(
            core,
            q,
            k,
            v,
            attention.tables,
            attention.tiles,
            attention.units,
            attention.bounds,
            attention.scales[layer],
            attention.windows[layer],
            np.float32(0.0),
            attention.no_sinks,
            out,
        )


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def _narrow(mixed: Any, row: int, out: Any) -> None:
    width = mixed.shape[2]
    for head in range(mixed.shape[1]):
        part, to = mixed[row, head], out[row, head * width : (head + 1) * width]
        for d in range(width):
            to[d] = _element(part[d], out)


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
    logit_rows: Any,
    logits: Any,
) -> None:
    """One core's part of a forward pass: x [T, hidden] holds the embeddings, and the residual afterwards."""
    rows, meeting = x.shape[0], 0
    first, end = rows * core // cores, rows * (core + 1) // cores
    tile, other = np.empty((TILE_ROWS, PANEL), np.float32), np.empty((TILE_ROWS, PANEL), np.float32)
    hidden, qkv, q, inner = buffers.hidden, buffers.qkv, buffers.q, buffers.inner
    q_width, no_bias = q.shape[1] * q.shape[2], attention.no_sinks
    k_width, v_width = cache.k_like.shape[1] * cache.k_like.shape[3], cache.v_like.shape[1] * cache.v_like.shape[3]
    for layer in range(len(weights.panels)):
        panels, bias = weights.panels[layer], weights.biases[layer]
        k = carray(_pointer(cache.k[layer]), cache.k_like.shape, cache.k_like.dtype)
        v = carray(_pointer(cache.v[layer]), cache.v_like.shape, cache.v_like.dtype)
        for row in range(first, end):
            _normalise(x, row, weights.norms[layer, BEFORE_ATTENTION], weights.epsilon, hidden, row)
        meeting = meet(counter, cores, meeting)
        _project(core, cores, hidden, rows, panels[Q], q_width, qkv, 0, bias, tile)
        _project(core, cores, hidden, rows, panels[K], k_width, qkv, q_width, bias, tile)
        _project(core, cores, hidden, rows, panels[V], v_width, qkv, q_width + k_width, bias, tile)
        meeting = meet(counter, cores, meeting)
        for row in range(first, end):
            to = (cache.blocks[row], cache.offsets[row])
            angle = rotary.rows[row]
            _place(
                row, qkv, rotary.cos[angle], rotary.sin[angle], weights.head_norms[layer], weights.epsilon, q, k, v, to
            )
        meeting = meet(counter, cores, meeting)
        _attend(core, layer, q, k, v, attention, buffers.mixed)
        meeting = meet(counter, cores, meeting)
        for row in range(first, end):
            _narrow(buffers.mixed, row, buffers.heads)
        meeting = meet(counter, cores, meeting)
        _project(core, cores, buffers.heads, rows, panels[O], x.shape[1], x, 0, no_bias, tile)
        meeting = meet(counter, cores, meeting)
        for row in range(first, end):
            _normalise(x, row, weights.norms[layer, BEFORE_MLP], weights.epsilon, hidden, row)
        meeting = meet(counter, cores, meeting)
        _gated(core, cores, hidden, rows, panels[GATE], panels[UP], weights.mlp_width, inner, tile, other)
        meeting = meet(counter, cores, meeting)
        _project(core, cores, inner, rows, panels[DOWN], x.shape[1], x, 0, no_bias, tile)
        meeting = meet(counter, cores, meeting)
    wanted = len(logit_rows)
    for i in range(wanted * core // cores, wanted * (core + 1) // cores):
        _normalise(x, logit_rows[i], weights.final_norm, weights.epsilon, hidden, i)
    meeting = meet(counter, cores, meeting)
    _logits(core, cores, hidden, wanted, weights.head, logits, tile)
