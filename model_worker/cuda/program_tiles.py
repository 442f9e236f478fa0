"""Triton functions that say which tile of a product a program has. Knows indices only."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit
def tile_of_product(count, outputs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr):
    """Return the tokens and the outputs of a program's tile, i64 [ROWS] and [COLUMNS].

    TOGETHER tiles of tokens are computed beside each other, one tile of outputs after the other.
    """
    row_tiles = tl.cdiv(count, ROWS)
    column_tiles = tl.cdiv(outputs, COLUMNS)
    program = tl.program_id(0)
    band = program // (TOGETHER * column_tiles)
    within = program % (TOGETHER * column_tiles)
    high = tl.minimum(row_tiles - band * TOGETHER, TOGETHER)
    row = ((band * TOGETHER + within % high) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (within // high * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    return row, column


@_jit
def pairs_of_tile(pairs, first, end, ROWS: tl.constexpr):
    """Return the pairs (routing.py) from the first one on, i64 [ROWS], and which of them are before the end."""
    place = first + tl.arange(0, ROWS)
    return tl.load(pairs + place, mask=place < end, other=0), place < end
