"""How products with weights in codes are cut into tiles and pieces, so that a card is kept busy. Knows sizes only."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


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
PIECE_OUTPUTS = 64
_PIECE_INPUTS = 512
# Bytes of shared memory of a program where a card does not say it: those of an A100.
_SHARED = 163 << 10
# And what a program has there beside its steps.
_SPARE = 4 << 10


def pieces_of(outputs: int, inputs: int, step: int) -> tuple[int, int]:
    """Return into how many pieces the inputs of a weight are cut, and how many steps each has, but for the last."""
    wanted = -(-PROGRAMS // -(-outputs // PIECE_OUTPUTS))
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


def stages_of(tile: Tile, step: int, bits: int, element: int, shared: int) -> int:
    """Return how many steps of inputs may be on their way in a program that has so many bytes of shared memory.

    Elements of inputs have so many bytes.
    """
    of_step = step * (tile.rows * element + tile.columns * bits // 8)
    return max(1, min(tile.stages, 1 + (shared - _SPARE) // of_step))


@cache
def shared_of(device: torch.device) -> int:
    """Return how many bytes of shared memory a program may have."""
    if device.type != "cuda":
        return _SHARED
    facts = torch.cuda.get_device_properties(device)
    return int(getattr(facts, "shared_memory_per_block_optin", _SHARED))


@cache
def processors_of(device: torch.device) -> int:
    """Return how many programs a device runs beside each other at least."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
