"""The two products of attention over cache blocks in the order in which vector registers read them.

Knows the order. A block keeps K of one head as words [element step, token] and V as [token step, element]: a word is
one float32, or two bfloat16 that follow each other in the dimension that is summed over, so that neither product adds
up within a register. Sixteen tokens are a group; a block holds whole groups. Does not know softmax, masks or sequences.
"""

from __future__ import annotations

from typing import Any

import numba.extending
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types

from model_worker.cpu.simd.dot_bf16 import (
    FLOATS,
    INDEX,
    LANES,
    TILE_ROWS,
    WORD,
    Operand,
    emit_products,
    load_words,
    prefetch,
    register_groups,
    store_sums,
    sums_at,
)
from model_worker.cpu.simd.elements import INSIDE

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic

# Tokens that are the lanes of one vector.
GROUP = LANES
# Groups whose scores are computed together.
PANEL_GROUPS = 4


def _score(rows: int) -> Any:
    """Make an intrinsic: out[r, group * GROUP + token] = inputs[first_row + r] . K of that token."""

    @intrinsic
    def tile(
        typing: Any, inputs: Any, like: Any, first_row: Any, groups: Any, stride: Any, prefetching: Any, out: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            operand = Operand(context, builder, signature.args[0], args[0], args[2], signature.args[1])
            places = context.make_array(signature.args[3])(context, builder, args[3]).data
            later = context.make_array(signature.args[5])(context, builder, args[5]).data
            bases, early_bases = (
                [
                    builder.inttoptr(builder.load(builder.gep(some, [ir.Constant(INDEX, g)])), WORD.as_pointer())
                    for g in range(PANEL_GROUPS)
                ]
                for some in (places, later)
            )

            def products(some: range) -> None:
                def fetch(at: Any, _ahead: Any) -> list[Any]:
                    for g in some:
                        prefetch(builder, builder.gep(early_bases[g], [builder.mul(at, ir.Constant(INDEX, LANES))]))
                    offset = builder.mul(at, args[4])
                    return load_words(builder, [builder.gep(bases[g], [offset]) for g in some])

                start = [ir.Constant(FLOATS, [0.0] * LANES)] * (rows * len(some))
                words = operand.words
                stride = operand.stride
                steps = operand.steps
                parts = operand.parts
                sums = emit_products(builder, rows, operand.step, words, stride, steps, fetch, start, parts=parts)
                store_sums(context, builder, signature.args[6], args[6], args[2], some[0], rows, sums)

            for some in register_groups(rows, PANEL_GROUPS):
                products(some)
            return context.get_dummy_value()

        return types.void(inputs, like, types.int64, groups, types.int64, prefetching, out), codegen

    return tile


def _gather(rows: int, vectors: int) -> Any:
    """Make an intrinsic: out[first_row + r, lane] += weights[first_row + r] . V of the groups' tokens."""

    @intrinsic
    def tile(
        typing: Any,
        weights: Any,
        like: Any,
        first_row: Any,
        count: Any,
        groups: Any,
        stride: Any,
        lane: Any,
        prefetching: Any,
        prefetch_stride: Any,
        out: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            operand = Operand(context, builder, signature.args[0], args[0], args[2], signature.args[1])
            places = context.make_array(signature.args[4])(context, builder, args[4]).data
            shift = 3 if signature.args[1].dtype == types.uint16 else 4  # steps of a group: 8 pairs of tokens, or 16
            later = context.make_array(signature.args[7])(context, builder, args[7]).data
            skipped = builder.lshr(args[6], ir.Constant(INDEX, 4 - shift))

            steps = builder.shl(args[3], ir.Constant(INDEX, shift))

            def products(some: range) -> None:
                def fetch(at: Any, _ahead: Any) -> list[Any]:
                    group = builder.lshr(at, ir.Constant(INDEX, shift))
                    place = builder.load(builder.gep(places, [group]))
                    step = builder.and_(at, ir.Constant(INDEX, (1 << shift) - 1))
                    within = builder.mul(step, args[5])
                    if vectors > 1:  # as many lines as are read, of as many as K of a group has
                        base = builder.inttoptr(builder.load(builder.gep(later, [group])), WORD.as_pointer())
                        first = builder.add(builder.mul(step, ir.Constant(INDEX, vectors)), skipped)
                        for v in some:
                            number = builder.add(first, ir.Constant(INDEX, v))
                            prefetch(builder, builder.gep(base, [builder.mul(number, args[8])]))
                    line = builder.gep(builder.inttoptr(place, WORD.as_pointer()), [builder.add(within, args[6])])
                    return load_words(builder, [builder.gep(line, [ir.Constant(INDEX, v * LANES)]) for v in some])

                lane = builder.add(args[6], ir.Constant(INDEX, some[0] * LANES))
                kept = sums_at(context, builder, signature.args[9], args[9], args[2], lane, rows, len(some))
                start = [builder.load(place, align=4) for place in kept]
                words = operand.words
                stride = operand.stride
                parts = operand.parts
                sums = emit_products(builder, rows, operand.step, words, stride, steps, fetch, start, parts=parts)
                for place, total in zip(kept, sums, strict=True):
                    builder.store(total, place, align=4)

            for some in register_groups(rows, vectors):
                products(some)
            return context.get_dummy_value()

        kinds = (
            weights,
            like,
            types.int64,
            types.int64,
            groups,
            types.int64,
            types.int64,
            prefetching,
            types.int64,
            out,
        )
        return types.void(*kinds), codegen

    return tile


_score_1, _score_2, _score_3, _score_4, _score_5, _score_6 = (_score(rows) for rows in range(1, TILE_ROWS + 1))
_four_1, _four_2, _four_3, _four_4, _four_5, _four_6 = (_gather(rows, 4) for rows in range(1, TILE_ROWS + 1))
_one_1, _one_2, _one_3, _one_4, _one_5, _one_6 = (_gather(rows, 1) for rows in range(1, TILE_ROWS + 1))


@njit(nogil=True, cache=True, **INSIDE)
def score(q: Any, like: Any, first: int, rows: int, groups: Any, stride: int, prefetching: Any, out: Any) -> None:
    """Compute out[first + r, g * GROUP + token] = q[first + r] . K, for up to TILE_ROWS rows and PANEL_GROUPS groups.

    `groups` are addresses of K, `stride` the words from one element step to the next. Meanwhile as many lines are
    prefetched from the addresses `prefetching` on.
    """
    if rows == 1:
        _score_1(q, like, first, groups, stride, prefetching, out)
    elif rows == 2:
        _score_2(q, like, first, groups, stride, prefetching, out)
    elif rows == 3:
        _score_3(q, like, first, groups, stride, prefetching, out)
    elif rows == 4:
        _score_4(q, like, first, groups, stride, prefetching, out)
    elif rows == 5:
        _score_5(q, like, first, groups, stride, prefetching, out)
    else:
        _score_6(q, like, first, groups, stride, prefetching, out)


@njit(nogil=True, cache=True, **INSIDE)
def gather(
    weights: Any,
    like: Any,
    first: int,
    rows: int,
    count: int,
    groups: Any,
    width: int,
    prefetching: Any,
    prefetch_stride: int,
    out: Any,
) -> None:
    """Add weights[first + r] . V of `count` groups at these addresses to out[first + r], for up to TILE_ROWS rows.

    Meanwhile K is prefetched from the addresses `prefetching`, with `prefetch_stride` words between two element steps.
    """
    lane = 0
    while lane < width:
        if width - lane >= 4 * LANES:
            _gather_four(weights, like, first, rows, count, groups, width, lane, prefetching, prefetch_stride, out)
            lane += 4 * LANES
        else:
            _gather_one(weights, like, first, rows, count, groups, width, lane, prefetching, prefetch_stride, out)
            lane += LANES


@njit(nogil=True, cache=True, **INSIDE)
def _gather_four(
    w: Any,
    like: Any,
    first: int,
    rows: int,
    count: int,
    groups: Any,
    width: int,
    lane: int,
    prefetching: Any,
    prefetch_stride: int,
    out: Any,
) -> None:
    if rows == 1:
        _four_1(w, like, first, count, groups, width, lane, prefetching, prefetch_stride, out)
    elif rows == 2:
        _four_2(w, like, first, count, groups, width, lane, prefetching, prefetch_stride, out)
    elif rows == 3:
        _four_3(w, like, first, count, groups, width, lane, prefetching, prefetch_stride, out)
    elif rows == 4:
        _four_4(w, like, first, count, groups, width, lane, prefetching, prefetch_stride, out)
    elif rows == 5:
        _four_5(w, like, first, count, groups, width, lane, prefetching, prefetch_stride, out)
    else:
        _four_6(w, like, first, count, groups, width, lane, prefetching, prefetch_stride, out)


@njit(nogil=True, cache=True, **INSIDE)
def _gather_one(
    w: Any,
    like: Any,
    first: int,
    rows: int,
    count: int,
    groups: Any,
    width: int,
    lane: int,
    prefetching: Any,
    prefetch_stride: int,
    out: Any,
) -> None:
    if rows == 1:
        _one_1(w, like, first, count, groups, width, lane, prefetching, prefetch_stride, out)
    elif rows == 2:
        _one_2(w, like, first, count, groups, width, lane, prefetching, prefetch_stride, out)
    elif rows == 3:
        _one_3(w, like, first, count, groups, width, lane, prefetching, prefetch_stride, out)
    elif rows == 4:
        _one_4(w, like, first, count, groups, width, lane, prefetching, prefetch_stride, out)
    elif rows == 5:
        _one_5(w, like, first, count, groups, width, lane, prefetching, prefetch_stride, out)
    else:
        _one_6(w, like, first, count, groups, width, lane, prefetching, prefetch_stride, out)
