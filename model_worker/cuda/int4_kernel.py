"""A Triton kernel of products with weights of four bits: codes become numbers in registers, as they are multiplied.

A weight has a scale for each output and group of inputs, and a zero, an offset, or one zero for all. Its inputs are
taken in steps (int4_linear.py), of whose bytes both halves are multiplied, so that no code has to move. Long sums are
cut into pieces, always at the same places. With few tokens each piece is a program's, and the last one to end adds them
up in their order. Knows elements only.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_worker.cuda.int4_linear import Packed, step_of
from model_worker.cuda.routing import Routing


class Tile(NamedTuple):
    """For at most so many tokens: tokens and outputs of a tile, warps, steps that are on their way, and whether each
    piece is a program's."""

    most: int
    rows: int
    columns: int
    warps: int
    stages: int
    is_split: bool

    def programs(self, count: int, outputs: int) -> int:
        """Return how many tiles so many tokens and outputs have."""
        return -(-count // self.rows) * -(-outputs // self.columns)


TILES = (
    Tile(16, 16, 64, 4, 4, True),
    Tile(32, 32, 64, 4, 4, True),
    Tile(64, 64, 64, 4, 4, True),
    Tile(1 << 31, 128, 128, 8, 3, False),
)
# Programs that keep a card busy. A weight with fewer tiles of outputs is cut into pieces of so many inputs, or more.
PROGRAMS = 256
_PIECE_OUTPUTS = 64
_PIECE_INPUTS = 512
# Tiles of tokens that are computed beside each other, so that they read the same weights from the cache.
_TOGETHER = 8
# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit
def sum_of_steps(
    from_x,
    has_row,
    from_codes,
    from_scales,
    from_zeros,
    has_column,
    first,
    last,
    KIND: tl.constexpr,
    MIDDLE: tl.constexpr,
    STEP: tl.constexpr,
    PER_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply a tile of outputs by one of tokens over these steps. The pointers are where each of them begins."""
    half = tl.arange(0, STEP // 2)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in range(first, last):
        packed = tl.load(from_codes[:, None] + (step * (STEP // 2) + half)[None, :], mask=has_column[:, None], other=0)
        at = from_x[None, :] + (step * STEP + half)[:, None]
        x_low = tl.load(at, mask=has_row[None, :], other=0.0)
        x_high = tl.load(at + STEP // 2, mask=has_row[None, :], other=0.0)
        group = step // PER_GROUP
        scale = tl.load(from_scales + group, mask=has_column, other=0.0).to(tl.float32)
        low = (packed & 15).to(tl.int8)
        high = (packed >> 4).to(tl.int8)
        if KIND == 0:
            low -= MIDDLE
            high -= MIDDLE
        if KIND == 1:
            zero = tl.load(from_zeros + group, mask=has_column, other=0)
            low -= zero[:, None]
            high -= zero[:, None]
        sums = tl.dot(low.to(x_low.dtype), x_low, input_precision="ieee")
        sums = tl.dot(high.to(x_low.dtype), x_high, sums, input_precision="ieee")
        total += sums * scale[:, None]
        if KIND == 2:
            offset = tl.load(from_zeros + group, mask=has_column, other=0.0).to(tl.float32)
            of_row = tl.sum(x_low.to(tl.float32), 0) + tl.sum(x_high.to(tl.float32), 0)
            total += offset[:, None] * of_row[None, :]
    return total


@_jit(do_not_specialize=["count"])
def int4_kernel(
    out,
    parts,
    arrived,
    x,
    codes,
    scales,
    zeros,
    bias,
    count,
    outputs,
    width,
    groups,
    pieces,
    steps_of_piece,
    KIND: tl.constexpr,
    MIDDLE: tl.constexpr,
    STEP: tl.constexpr,
    PER_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BIASED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Multiply a tile of `count` tokens by one of outputs. Sums of pieces of the inputs are added up in their order.

    Programs: tiles of TOGETHER tiles of tokens, one tile of outputs after the other; piece, if they are SPLIT. Those of
    a tile count themselves in `arrived`, which is 0 before and after.
    """
    row_tiles = tl.cdiv(count, ROWS)
    column_tiles = tl.cdiv(outputs, COLUMNS)
    program = tl.program_id(0)
    band = program // (TOGETHER * column_tiles)
    within = program % (TOGETHER * column_tiles)
    high = tl.minimum(row_tiles - band * TOGETHER, TOGETHER)
    row = ((band * TOGETHER + within % high) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (within // high * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    has_row = row < count
    has_column = column < outputs
    inside = has_column[:, None] & has_row[None, :]
    steps = width // STEP
    from_x = x + row * width
    from_codes = codes + column * (width // 2)
    from_scales = scales + column * groups
    from_zeros = zeros + column * groups
    place = row[None, :] * outputs + column[:, None]
    begin = 0
    end = pieces
    if SPLIT:
        begin = tl.program_id(1)
        end = begin + 1
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for piece in range(begin, end):
        total += sum_of_steps(
            from_x,
            has_row,
            from_codes,
            from_scales,
            from_zeros,
            has_column,
            piece * steps_of_piece,
            tl.minimum((piece + 1) * steps_of_piece, steps),
            KIND,
            MIDDLE,
            STEP,
            PER_GROUP,
            ROWS,
            COLUMNS,
        )
    is_last = True
    if SPLIT:
        tl.store(parts + begin * count * outputs + place, total, mask=inside)
        # All threads have written before one of them counts.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + program, 1, sem="acq_rel") == pieces - 1
        if is_last:
            total = tl.zeros([COLUMNS, ROWS], tl.float32)
            for piece in range(pieces):
                # Not from a cache of this processor alone.
                total += tl.load(parts + piece * count * outputs + place, mask=inside, cache_modifier=".cg")
            tl.store(arrived + program, 0)
    if is_last:
        if BIASED:
            total += tl.load(bias + column, mask=has_column, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@_jit(do_not_specialize=["per_token"])
def int4_experts_kernel(
    out,
    x,
    codes,
    scales,
    zeros,
    pairs,
    experts,
    firsts,
    ends,
    per_token,
    outputs,
    width,
    groups,
    KIND: tl.constexpr,
    MIDDLE: tl.constexpr,
    STEP: tl.constexpr,
    PER_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply tiles of pairs (routing.py) by their expert's weight. Pair p has the input `p // per_token`.

    Programs: tile of pairs, tile of outputs.
    """
    expert = tl.load(experts + tl.program_id(0))
    if expert >= 0:
        place = tl.load(firsts + tl.program_id(0)) + tl.arange(0, ROWS)
        has_row = place < tl.load(ends + tl.program_id(0))
        pair = tl.load(pairs + place, mask=has_row, other=0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        has_column = column < outputs
        of_expert = expert * outputs + column
        total = sum_of_steps(
            x + pair // per_token * width,
            has_row,
            codes + of_expert * (width // 2),
            scales + of_expert * groups,
            zeros + of_expert * groups,
            has_column,
            0,
            width // STEP,
            KIND,
            MIDDLE,
            STEP,
            PER_GROUP,
            ROWS,
            COLUMNS,
        )
        to = out + pair[None, :] * outputs + column[:, None]
        tl.store(to, total.to(out.dtype.element_ty), mask=has_column[:, None] & has_row[None, :])


def pieces_of(outputs: int, inputs: int, step: int) -> tuple[int, int]:
    """Return into how many pieces the inputs of a weight are cut, and how many steps each has, but for the last."""
    wanted = -(-PROGRAMS // -(-outputs // _PIECE_OUTPUTS))
    steps = inputs // step
    pieces = max(1, min(wanted, inputs // _PIECE_INPUTS))
    of_piece = -(-steps // pieces)
    return -(-steps // of_piece), of_piece


def tile_of(count: int, outputs: int, pieces: int, processors: int) -> Tile:
    """Return the tile for so many tokens, whose pieces are programs only if there are several.

    Where the largest would leave some of a card's processors idle, it is the next smaller one; and where this does so,
    too, each piece is a program's.
    """
    tile = next(tile for tile in TILES if count <= tile.most)
    if tile is TILES[-1] and tile.programs(count, outputs) < processors:
        tile = TILES[-2]
        few = tile.programs(count, outputs) < min(processors, PROGRAMS)
        return tile._replace(is_split=few and pieces > 1)
    return tile._replace(is_split=tile.is_split and pieces > 1)


@cache
def _processors(device: torch.device) -> int:
    """Return how many programs a device runs beside each other at least."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def multiply(x: Tensor, weight: Packed, bias: Tensor | None, arrived: Tensor) -> Tensor:
    """Multiply rows [T, in], whose elements lie side by side, by a weight, and add a bias [out].

    `arrived` is i32[PROGRAMS] of zeros, and of no other product at that time. Returns [T, out] in the dtype of rows.
    """
    count, width = x.shape
    outputs, groups = weight.scales.shape
    step = step_of(width // groups)
    pieces, of_piece = pieces_of(outputs, width, step)
    tile = tile_of(count, outputs, pieces, _processors(x.device))
    split, tiles = tile.is_split, tile.programs(count, outputs)
    assert not split or tiles <= len(arrived), (tiles, len(arrived))
    out = torch.empty(count, outputs, dtype=x.dtype, device=x.device)
    parts = torch.empty(pieces, count, outputs, device=x.device) if split else out
    if not count:
        return out
    int4_kernel[(tiles, pieces if split else 1)](
        out,
        parts,
        arrived,
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        count,
        outputs,
        width,
        groups,
        pieces,
        of_piece,
        KIND=weight.kind,
        MIDDLE=weight.middle,
        STEP=step,
        PER_GROUP=width // groups // step,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        TOGETHER=_TOGETHER,
        BIASED=bias is not None,
        SPLIT=split,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def multiply_experts(x: Tensor, weight: Packed, routing: Routing, experts: int) -> Tensor:
    """Multiply pairs of tokens and experts by the weights of these, [experts * out, in]. Returns [pairs, out].

    `x` [T, in] are tokens, or the pairs themselves.
    """
    width = x.shape[1]
    outputs, groups = len(weight.codes) // experts, weight.scales.shape[1]
    step = step_of(width // groups)
    out = torch.empty(len(routing.pairs), outputs, dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    int4_experts_kernel[(len(routing.experts), -(-outputs // _PIECE_OUTPUTS))](
        out,
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        routing.pairs,
        routing.experts,
        routing.firsts,
        routing.ends,
        len(routing.pairs) // len(x),
        outputs,
        width,
        groups,
        KIND=weight.kind,
        MIDDLE=weight.middle,
        STEP=step,
        PER_GROUP=width // groups // step,
        ROWS=routing.rows,
        COLUMNS=_PIECE_OUTPUTS,
        num_warps=4,
        num_stages=4,
    )
    return out
