"""Positions of tokens in three directions (M-RoPE): a pure function of where images stand and of their grids.

Text counts on in all three directions. An image counts time, rows and columns from its first token on, and the text
behind it goes on from the largest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from interfaces import ImageMetadata

GRID = "image_grid_thw"


class GridPositions(NamedTuple):
    """Positions i64[3, n] of the first n tokens; the token at a later index i has i + delta in all directions."""

    first: NDArray[np.int64]
    delta: int

    def at(self, start: int, count: int) -> NDArray[np.int64]:
        """Positions [3, count] of the tokens from index `start` on."""
        later = np.arange(max(start, self.first.shape[1]), start + count) + self.delta
        return np.concatenate([self.first[:, start : start + count], np.broadcast_to(later, (3, len(later)))], axis=1)


def grid_positions(images: Sequence[ImageMetadata], merge_size: int) -> GridPositions:
    """Return the positions of a prompt. ValueError when the grid of an image does not fit its tokens."""
    parts: list[NDArray[np.int64]] = [np.empty((3, 0), np.int64)]
    index = 0
    position = 0
    for image in images:
        text = position + np.arange(image.start_idx - index)
        parts.append(np.broadcast_to(text, (3, len(text))))
        position += len(text)
        frames, height, width = _grid(image, merge_size)
        axes = np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), indexing="ij")
        parts.append(position + np.stack(axes).reshape(3, -1))
        position += max(height, width)
        index = image.end_idx
    return GridPositions(np.concatenate(parts, axis=1).astype(np.int64), position - index)


def _grid(image: ImageMetadata, merge_size: int) -> tuple[int, int, int]:
    """Frames, and tokens along each side."""
    grid = image.side_arrays.get(GRID)
    if grid is None or grid.size != 3:
        raise ValueError(f"extras of an image must have {GRID} with three numbers, got {sorted(image.extras)}")
    frames, height, width = (int(n) for n in grid.reshape(-1))
    tokens = frames * (height // merge_size) * (width // merge_size)
    if tokens != image.end_idx - image.start_idx:
        raise ValueError(
            f"{GRID} {[frames, height, width]} makes {tokens} tokens, and {image.end_idx - image.start_idx} stand for "
            "the image"
        )
    return frames, height // merge_size, width // merge_size
