"""From a token's projections to rotated queries, as operand of the scores, and to K and V in their slots of the cache.

Knows the memory layout of blocks (cache_dot.py): K as words [element step, token], V as [token step, element]; a word
is one float32 or two bfloat16, and two codes of a cache in codes (kv_codes.py). Sixteen elements at a time go through
vector registers, from and to addresses: as loops over arrays, whose slices may overlap for all that a compiler knows,
this took as long as a third of attention. Indices are not checked.
"""

from __future__ import annotations

from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types

from model_worker.cpu.fused.attention import key_group, key_scale, value_group, value_scale
from model_worker.cpu.gemm.weight_format import LANE_BYTES
from model_worker.cpu.simd.cache_dot import GROUP
from model_worker.cpu.simd.dot_bf16 import FLOATS, INDEX, LANES, WORD, WORDS, sums_at
from model_worker.cpu.simd.elements import INSIDE, MATH, carray, element, pointer
from model_worker.cpu.simd.kv_codes import IN_WORDS, encode_token
from model_worker.cpu.simd.vectors import load_lanes, round_lanes, store_lanes

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic

# Tokens of a piece, of one head: two lines of memory in each row of the keys of a block, and as many as a core takes
# without delay.
PIECE_TOKENS = 32


def _at(context: Any, builder: Any, kind: Any, value: Any, index: Any) -> Any:
    """Return the address of an element of a one-dimensional array."""
    return builder.gep(context.make_array(kind)(context, builder, value).data, [index])


@intrinsic
def _rotate_lanes(typing: Any, head: Any, cos: Any, sin: Any, angle: Any, at: Any, half: Any, out: Any) -> Any:
    """Rotate sixteen lanes: out[at + lane] and out[at + half + lane] = elements of float32 `head`, turned by an
    angle."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        places = (args[4], builder.add(args[4], args[5]))
        low, high = (load_lanes(builder, _at(context, builder, kinds[0], args[0], place)) for place in places)
        cosines, sines = (
            [
                builder.load(sums_at(context, builder, kinds[i], args[i], args[3], place, 1, 1)[0], align=4)
                for place in places
            ]
            for i in (1, 2)
        )
        turned = (
            builder.fsub(builder.fmul(low, cosines[0]), builder.fmul(high, sines[0])),
            builder.fadd(builder.fmul(high, cosines[1]), builder.fmul(low, sines[1])),
        )
        for place, vector in zip(places, turned, strict=True):
            store_lanes(builder, vector, _at(context, builder, kinds[6], args[6], place), kinds[6].dtype)
        return context.get_dummy_value()

    return types.void(head, cos, sin, types.int64, types.int64, types.int64, out), codegen


@intrinsic
def _copy_lanes(typing: Any, head: Any, at: Any, out: Any) -> Any:
    """Copy sixteen lanes: out[at + lane] = elements of float32 `head`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        vector = load_lanes(builder, _at(context, builder, kinds[0], args[0], args[1]))
        store_lanes(builder, vector, _at(context, builder, kinds[2], args[2], args[1]), kinds[2].dtype)
        return context.get_dummy_value()

    return types.void(head, types.int64, out), codegen


@intrinsic
def _scatter_lanes(typing: Any, values: Any, at: Any, memory: Any, word: Any, odd: Any) -> Any:
    """Scatter sixteen lanes of float32 `values` into as many words from memory[word] on: bfloat16 into one half of
    each.

    The other half keeps its contents: another core may write it at the same time.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        vector = load_lanes(builder, _at(context, builder, kinds[0], args[0], args[1]))
        place = _at(context, builder, kinds[2], args[2], args[3])
        if kinds[2].dtype == types.float32:
            builder.store(vector, builder.bitcast(place, FLOATS.as_pointer()), align=4)
            return context.get_dummy_value()
        halves = ir.VectorType(ir.IntType(16), 2 * LANES)
        bits = ir.VectorType(ir.IntType(1), 2 * LANES)
        words = builder.zext(round_lanes(builder, vector), WORDS)
        kind = ir.FunctionType(ir.VoidType(), (halves, halves.as_pointer(), WORD, bits))
        function = builder.module.declare_intrinsic("llvm.masked.store.v32i16.p0", (), kind)
        odd = builder.icmp_signed("!=", args[4], ir.Constant(INDEX, 0))
        with builder.if_else(odd) as branches:
            for branch, half in zip(branches, (1, 0), strict=True):
                with branch:
                    moved = builder.shl(words, ir.Constant(WORDS, [16 * half] * LANES))
                    mask = ir.Constant(bits, [number % 2 == half for number in range(2 * LANES)])
                    target = builder.bitcast(place, halves.as_pointer())
                    builder.call(function, (builder.bitcast(moved, halves), target, ir.Constant(WORD, 2), mask))
        return context.get_dummy_value()

    return types.void(values, types.int64, memory, types.int64, types.int64), codegen


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def _normalise_head(head: int, weight: Any, epsilon: Any) -> None:
    values = carray(pointer(head), (len(weight),), np.float32)
    total = np.float32(0.0)
    for d in range(len(weight)):
        total += values[d] * values[d]
    share = np.float32(1.0) / np.sqrt(total / np.float32(len(weight)) + epsilon)
    for d in range(len(weight)):
        values[d] *= share * weight[d]


@njit(nogil=True, cache=True, **INSIDE)
def _rotate(head: int, dim: int, angle: int, rotary: Any, like: Any, to: int) -> None:
    """Rotate the first elements, element d with element d + half; the others stay as they are.

    float32 [dim] at the address `head`, as elements of `like` to the address `to`.
    """
    rotated = rotary.cos.shape[1]
    half = rotated // 2
    values = carray(pointer(head), (dim,), np.float32)
    out = carray(pointer(to), (dim,), like.dtype)
    for d in range(0, half - LANES + 1, LANES):
        _rotate_lanes(values, rotary.cos, rotary.sin, angle, d, half, out)
    for d in range(half // LANES * LANES, half):
        low = values[d]
        high = values[half + d]
        out[d] = element(low * rotary.cos[angle, d] - high * rotary.sin[angle, d], out)
        out[half + d] = element(high * rotary.cos[angle, half + d] + low * rotary.sin[angle, half + d], out)
    whole = rotated + (dim - rotated) // LANES * LANES
    for d in range(rotated, whole, LANES):
        _copy_lanes(values, d, out)
    for d in range(whole, dim):
        out[d] = element(values[d], out)


@njit(nogil=True, cache=True, **INSIDE)
def _scatter_key(to: int, size: int, steps: int, rotated: int) -> None:
    """Scatter one token's K as cache_dot.py expects it: from the address `rotated` to `to`."""
    words = carray(pointer(rotated), (steps,), np.uint32)
    memory = carray(pointer(to), (steps * size,), np.uint32)
    for step in range(steps):
        memory[step * size] = words[step]


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _scatter_value(to: int, dim: int, offset: int, value: int, unused: int, like: Any) -> None:
    """Scatter one token's V, and zeros after it: their weight is 0, but 0 times a NaN is NaN.

    float32 [dim] at the address `value`, for token number `offset` of the group that begins at the address `to`.
    """
    part = LANE_BYTES // like.itemsize
    values = carray(pointer(value), (dim,), np.float32)
    memory = carray(pointer(to), (dim * GROUP,), like.dtype)
    first = offset // part * part * dim
    odd = offset % part
    for d in range(0, dim, LANES):
        _scatter_lanes(values, d, memory, first + d * part, odd)
    for after in range(offset + 1, offset + 1 + unused):
        first = after // part * part * dim + after % part
        for d in range(dim):
            memory[first + d * part] = element(np.float32(0.0), memory)


@njit(nogil=True, cache=True, **INSIDE)
def pieces_of(tokens: int, q: Any, cache: Any) -> Any:
    """Return the number of pieces of `rotate_and_write_kv`: a head of some tokens each, in the order of the
    projections."""
    return (q.shape[1] + 2 * cache.kv_heads) * -(-tokens // PIECE_TOKENS)


@njit(nogil=True, cache=True, **INSIDE)
def rotate_and_write_kv(layer: int, block: Any, taken: Any, work: Any) -> None:
    """Rotate the projections of a block of tokens, which are in the buffers: Q goes into `q`, K and V into the cache.

    Arguments are as those of layer.py's phases. The pieces follow each other as the projections do, so that most are
    taken by the core that has made them.
    """
    first, count, at = block
    qkv = work.buffers.qkv
    q = work.buffers.q
    keys = work.buffers.keys
    cache = work.cache
    rotary = work.rotary
    head_norms = work.weights.head_norms[layer]
    epsilon = work.weights.epsilon
    heads = q.shape[1]
    kv_heads = cache.kv_heads
    dim = q.shape[2]
    v_dim = cache.v_dim
    steps = dim * cache.like.itemsize // LANE_BYTES
    like = cache.like
    chunks = -(-count // PIECE_TOKENS)
    row_bytes = qkv.shape[1] * LANE_BYTES
    from_qkv = qkv.ctypes.data
    to_q = q.ctypes.data
    to_keys = keys.ctypes.data
    for piece in range(taken[0], taken[0] + taken[1]):
        head = piece // chunks
        skipped = piece % chunks * PIECE_TOKENS
        kv = (head - heads) % kv_heads
        column = head * dim if head < heads + kv_heads else (heads + kv_heads) * dim + kv * v_dim
        for row in range(skipped, min(skipped + PIECE_TOKENS, count)):
            token = first + row
            part = from_qkv + (at + row) * row_bytes + column * LANE_BYTES
            angle = rotary.rows[token]
            number = cache.blocks[token]
            offset = cache.offsets[token]
            if head < heads + kv_heads and head_norms.shape[1]:
                _normalise_head(part, head_norms[0 if head < heads else 1], epsilon)
            if head < heads:
                _rotate(part, dim, angle, rotary, q, to_q + (token * heads + head) * dim * q.itemsize)
            elif head < heads + kv_heads:
                rotated = to_keys + ((at + row) * kv_heads + kv) * dim * like.itemsize
                _rotate(part, dim, angle, rotary, like, rotated)
                to = key_group(cache, layer, kv, number, offset)
                if cache.kind == IN_WORDS:
                    _scatter_key(to, cache.block_size, steps, rotated)
                else:
                    elements = carray(pointer(rotated), (dim,), like.dtype)
                    scale = key_scale(cache, layer, kv, number, offset)
                    encode_token(cache.kind, elements, to, 2 * cache.block_size, 1, scale)
            elif cache.kind != IN_WORDS:
                to = value_group(cache, layer, kv, number, offset // 2 * 2) + offset % 2
                values = carray(pointer(part), (v_dim,), np.float32)
                encode_token(cache.kind, values, to, 4, 2, value_scale(cache, layer, kv, number, offset))
            else:
                to = value_group(cache, layer, kv, number, offset // GROUP * GROUP)
                _scatter_value(to, v_dim, offset % GROUP, part, cache.unused[token], like)
