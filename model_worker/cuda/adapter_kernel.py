"""Triton kernels that add low-rank products to rows, each row by the factors of its own slot. Knows addresses only.

A table has what adapters make of a linear layer: FIELDS numbers for each slot. A column has the slot of each row; a row
without one has -1.

Programs take tiles of rows that lie side by side, and of these all rows of one slot at a time. So factors are read once
for all rows of a prompt in a tile. A row's sums have the same order wherever it lies, and whatever lies beside it: a
program multiplies a tile of always the same size, and rows of other slots are zeros there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# The numbers of a slot in a table: where A [rank, in] and B' [rank, out] lie, in units of UNIT bytes from a base, so
# that the compiler knows how they are aligned; the rank; the bits of a scale; and the addresses of a gain f32 [out] and
# a shift f32 [out], which are 0 where there is none.
FIELDS = 6
UNIT = 16
# Ranks of a tile: what `add_low_rank` takes as the most of a table is a multiple.
RANKS = 16
# Rows of a tile, inputs that a program reads at a time, and outputs of a program.
_TILE = 16
_INPUTS = 128
_OUTPUTS = 128
# Inputs are summed in pieces: as many as this, or of so many inputs, where that makes fewer.
_MOST_PIECES = 8
_LEAST_PIECE = 1024
# Up to so many rows programs are few, so that each takes one slot of a tile, and one piece. Beyond, it takes several.
_FEW_ROWS = 128
_LANES = 4
# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit(do_not_specialize=["rows", "lanes"])
def shrink_kernel(
    inner,
    x,
    base,
    table,
    column,
    rows,
    lanes,
    width,
    widest,
    x_row,
    FIELDS: tl.constexpr,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    PIECE: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Multiply rows by some rows of their A: f32 [pieces, rows, widest], or the sum of pieces if `TOGETHER`.

    Programs: tile of rows and lane, tile of ranks, piece. A lane takes some rows of its tile, and for each that is the
    first with its slot all that have it.
    """
    first_row = tl.program_id(0) // lanes * TILE
    place = tl.arange(0, TILE)
    at_row = first_row + place
    slots = tl.load(column + at_row, mask=at_row < rows, other=-1)
    first_rank = tl.program_id(1) * RANKS
    at_rank = first_rank + tl.arange(0, RANKS)
    from_row = x + at_row.to(tl.int64) * x_row
    first = 0 if TOGETHER else tl.program_id(2) * PIECE
    last = width if TOGETHER else tl.minimum(first + PIECE, width)
    to = inner + (tl.program_id(2) * rows + at_row).to(tl.int64) * widest
    for number in range(tl.program_id(0) % lanes, tl.minimum(rows - first_row, TILE), lanes):
        slot = tl.load(column + first_row + number)
        has_slot = slots == slot
        if slot >= 0 and tl.sum((has_slot & (place < number)).to(tl.int32)) == 0:
            fields = table + slot.to(tl.int64) * FIELDS
            rank = tl.load(fields + 2).to(tl.int32)
            if first_rank < rank:
                a = base + tl.load(fields) * (128 // base.dtype.element_ty.primitive_bitwidth)
                from_rank = a + at_rank * width
                total = tl.zeros([TILE, RANKS], tl.float32)
                for piece in range(first, last, PIECE):
                    sums = tl.zeros([TILE, RANKS], tl.float32)
                    for start in range(piece, tl.minimum(piece + PIECE, width), INPUTS):
                        at = start + tl.arange(0, INPUTS)
                        inside = at < width
                        value = tl.load(from_row[:, None] + at, mask=has_slot[:, None] & inside, other=0.0)
                        factor = tl.load(
                            from_rank[None, :] + at[:, None], mask=(at_rank < rank) & inside[:, None], other=0.0
                        )
                        sums = tl.dot(value, factor, sums, input_precision="ieee")
                    total += sums
                tl.store(to[:, None] + at_rank, total, mask=has_slot[:, None])


@_jit
def gather_kernel(inner, tokens, base, table, column, widest, FIELDS: tl.constexpr, RANKS: tl.constexpr):
    """Take the vectors of tokens from their A [vocabulary, rank]: f32 [rows, widest]. Programs: row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(column + row)
    if slot >= 0:
        fields = table + slot.to(tl.int64) * FIELDS
        rank = tl.load(fields + 2).to(tl.int32)
        vector = base + tl.load(fields) * (128 // base.dtype.element_ty.primitive_bitwidth)
        vector += tl.load(tokens + row).to(tl.int64) * rank
        for first in range(0, rank, RANKS):
            at = first + tl.arange(0, RANKS)
            value = tl.load(vector + at, mask=at < rank, other=0.0)
            tl.store(inner + row * widest + at, value.to(tl.float32))


@_jit(do_not_specialize=["rows", "lanes", "pieces"])
def expand_kernel(
    y,
    inner,
    base,
    table,
    column,
    rows,
    lanes,
    outputs,
    widest,
    pieces,
    y_row,
    FIELDS: tl.constexpr,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Change some outputs of rows: gain (y + scale (inner B')) + shift.

    Programs: tile of rows and lane, tile of outputs.
    """
    first_row = tl.program_id(0) // lanes * TILE
    place = tl.arange(0, TILE)
    at_row = first_row + place
    slots = tl.load(column + at_row, mask=at_row < rows, other=-1)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    has_output = output < outputs
    to = y + at_row.to(tl.int64)[:, None] * y_row + output
    for number in range(tl.program_id(0) % lanes, tl.minimum(rows - first_row, TILE), lanes):
        slot = tl.load(column + first_row + number)
        has_slot = slots == slot
        if slot >= 0 and tl.sum((has_slot & (place < number)).to(tl.int32)) == 0:
            fields = table + slot.to(tl.int64) * FIELDS
            rank = tl.load(fields + 2).to(tl.int32)
            if rank > 0:
                b = base + tl.load(fields + 1) * (128 // base.dtype.element_ty.primitive_bitwidth)
                scale = tl.load(fields + 3).to(tl.int32).to(tl.float32, bitcast=True)
                gain = tl.load(fields + 4).to(tl.pointer_type(tl.float32))
                shift = tl.load(fields + 5).to(tl.pointer_type(tl.float32))
                has_gain = has_output & (tl.load(fields + 4) != 0)
                has_shift = has_output & (tl.load(fields + 5) != 0)
                total = tl.zeros([TILE, OUTPUTS], tl.float32)
                for first in range(0, rank, RANKS):
                    at = first + tl.arange(0, RANKS)
                    value = tl.zeros([TILE, RANKS], tl.float32)
                    for piece in range(pieces):
                        from_row = inner + (piece * rows + at_row).to(tl.int64) * widest
                        value += tl.load(from_row[:, None] + at, mask=has_slot[:, None], other=0.0)
                    inside = (at < rank)[:, None] & has_output
                    factor = tl.load(b + at.to(tl.int64)[:, None] * outputs + output, mask=inside, other=0.0)
                    total = tl.dot(value.to(factor.dtype), factor, total, input_precision="ieee")
                changed = tl.load(to, mask=has_slot[:, None] & has_output, other=0.0).to(tl.float32) + scale * total
                changed = changed * tl.load(gain + output, mask=has_gain, other=1.0)
                changed = changed + tl.load(shift + output, mask=has_shift, other=0.0)
                tl.store(to, changed.to(y.dtype.element_ty), mask=has_slot[:, None] & has_output)


def add_low_rank(y: Tensor, x: Tensor, base: Tensor, table: Tensor, column: Tensor, widest: int) -> None:
    """Change rows y [T, out] by what the factors of their slots make of x [T, in]. Both have elements side by side.

    `table` is i64 [slots, FIELDS], `column` i32 [T]. Factors have the type of x and `base`, and ranks up to `widest`.
    """
    rows, width = x.shape
    piece = max(_LEAST_PIECE, triton.cdiv(triton.cdiv(width, _MOST_PIECES), _INPUTS) * _INPUTS)
    pieces = triton.cdiv(width, piece) if rows <= _FEW_ROWS else 1
    inner = torch.empty(pieces, rows, widest, device=x.device)
    shrink_kernel[(_tiles(rows), widest // RANKS, pieces)](
        inner,
        x,
        base,
        table,
        column,
        rows,
        _lanes(rows),
        width,
        widest,
        x.stride(0),
        FIELDS=FIELDS,
        TILE=_TILE,
        RANKS=RANKS,
        INPUTS=_INPUTS,
        PIECE=piece,
        TOGETHER=rows > _FEW_ROWS,
    )
    _expand(y, inner, base, table, column)


def add_vectors(y: Tensor, tokens: Tensor, base: Tensor, table: Tensor, column: Tensor, widest: int) -> None:
    """Change the vectors y [T, out] of tokens i64 [T] by the factors of their slots, of which A is [vocabulary, rank].

    The rest is as `add_low_rank` has it.
    """
    inner = torch.empty(1, len(tokens), widest, device=y.device)
    gather_kernel[(len(tokens),)](inner, tokens, base, table, column, widest, FIELDS=FIELDS, RANKS=RANKS)
    _expand(y, inner, base, table, column)


def _expand(y: Tensor, inner: Tensor, base: Tensor, table: Tensor, column: Tensor) -> None:
    rows, outputs = y.shape
    expand_kernel[(_tiles(rows), triton.cdiv(outputs, _OUTPUTS))](
        y,
        inner,
        base,
        table,
        column,
        rows,
        _lanes(rows),
        outputs,
        inner.shape[2],
        inner.shape[0],
        y.stride(0),
        FIELDS=FIELDS,
        TILE=_TILE,
        RANKS=RANKS,
        OUTPUTS=_OUTPUTS,
    )


def _lanes(rows: int) -> int:
    """Return the number of programs that share the slots of a tile."""
    return max(1, min(rows, _TILE)) if rows <= _FEW_ROWS else _LANES


def _tiles(rows: int) -> int:
    """Return the number of programs for all tiles of rows."""
    return int(triton.cdiv(rows, _TILE)) * _lanes(rows)
