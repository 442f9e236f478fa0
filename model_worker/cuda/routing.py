"""Which tiles of a product have which expert's tokens: found on the device, so that a recorded step may route anew.

A row of such a product is a pair of a token and one of its experts. Pairs of an expert come one behind the other, and
begin a tile. Knows numbers of experts only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Rows of a tile by the pairs of an expert, if all have as many.
_ROWS = ((8, 16), (32, 32), (1 << 31, 64))


class Routing(NamedTuple):
    """The tiles of a step: as many as may be needed. One that is not needed begins where it ends, or behind."""

    pairs: Tensor  # i64 [pairs]: in the order of their experts
    experts: Tensor  # i64 [tiles]
    firsts: Tensor  # i64 [tiles]: where in `pairs` a tile begins
    ends: Tensor  # i64 [tiles]: and where the pairs of its expert end
    rows: int  # of a tile


def route(chosen: Tensor, experts: int) -> Routing:
    """Order the pairs of tokens and experts, i64 [T, chosen of a token], by expert. Waits for nothing."""
    ids = chosen.reshape(-1)
    count = len(ids)
    rows = next(rows for most, rows in _ROWS if count <= most * experts)
    sorted_ids, pairs = ids.sort(stable=True)
    # Where the pairs of each expert begin and end; behind the last one is one without pairs, for tiles without any.
    edges = torch.searchsorted(sorted_ids, torch.arange(experts + 2, device=ids.device, dtype=ids.dtype))
    tiles = (edges.diff() + (rows - 1)) // rows
    until = tiles.cumsum(0)
    number = torch.arange(min(count, experts + count // rows), device=ids.device)
    expert = torch.searchsorted(until[:-1], number, right=True)
    # A tile's number counts those of the experts before.
    firsts = (edges[:-1] - (until - tiles) * rows)[expert] + number * rows
    return Routing(pairs, expert, firsts, edges[1:][expert], rows)
