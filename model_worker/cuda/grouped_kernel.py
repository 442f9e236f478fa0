"""A Triton kernel of products with weights of four or eight bits, which have no decoded copy.

Long sums are cut into pieces, always at the same places. With few tokens each piece is a program's, and the last one to
end adds them up in their order. Knows elements only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_worker.cuda.grouped_linear import Packed, step_of
from model_worker.cuda.grouped_sum import sum_of_steps
from model_worker.cuda.product_tiles import pieces_of, processors_of, shared_of, stages_of, tile_of
from model_worker.cuda.program_tiles import tile_of_product

# Tiles of tokens that are computed beside each other, so that they read the same weights from the cache.
_TOGETHER = 8
# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit(do_not_specialize=["count"])
def grouped_kernel(
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
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    MIDDLE: tl.constexpr,
    TABLE: tl.constexpr,
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
    program = tl.program_id(0)
    row, column = tile_of_product(count, outputs, ROWS, COLUMNS, TOGETHER)
    has_row = row < count
    has_column = column < outputs
    inside = has_column[:, None] & has_row[None, :]
    steps = width // STEP
    from_x = x + row * width
    from_codes = codes + column * (width * BITS // 8)
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
            arrived,
            has_column,
            piece * steps_of_piece,
            tl.minimum((piece + 1) * steps_of_piece, steps),
            False,
            BITS,
            KIND,
            MIDDLE,
            TABLE,
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


def multiply(x: Tensor, weight: Packed, bias: Tensor | None, arrived: Tensor) -> Tensor:
    """Multiply rows [T, in], whose elements lie side by side, by a weight, and add a bias [out].

    `arrived` is i32[PROGRAMS] of zeros, and of no other product at that time. Returns [T, out] in the dtype of rows.
    """
    count, width = x.shape
    outputs, groups = weight.scales.shape
    step = step_of(width // groups)
    pieces, of_piece = pieces_of(outputs, width, step)
    tile = tile_of(count, outputs, pieces, processors_of(x.device))
    split, tiles = tile.is_split, tile.programs(count, outputs)
    assert not split or tiles <= len(arrived), (tiles, len(arrived))
    out = torch.empty(count, outputs, dtype=x.dtype, device=x.device)
    parts = torch.empty(pieces, count, outputs, device=x.device) if split else out
    if not count:
        return out
    grouped_kernel[(tiles, pieces if split else 1)](
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
        BITS=weight.coding.bits,
        KIND=weight.kind,
        MIDDLE=weight.coding.middle,
        TABLE=int.from_bytes(weight.coding.table, "little"),
        STEP=step,
        PER_GROUP=width // groups // step,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        TOGETHER=_TOGETHER,
        BIASED=bias is not None,
        SPLIT=split,
        num_warps=tile.warps,
        num_stages=stages_of(tile, step, weight.coding.bits, x.element_size(), shared_of(x.device)),
    )
    return out
