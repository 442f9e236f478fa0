"""Positions of tokens in three directions (M-RoPE): a pure function of where images stand and of their grids.

Text counts on in all three directions. An image counts time, rows and columns from its first token on, and the text
behind it goes on from the larger number of its rows and columns. A video counts its time in frames or in seconds; where
texts stand between its frames, each run of frames counts like an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from interfaces import ImageMetadata

GRID = "image_grid_thw"
VIDEO_GRID = "video_grid_thw"
# Seconds of a video for each step of its grid in time.
SECONDS = "second_per_grid_ts"


class GridPositions(NamedTuple):
    """Positions i64[3, n] of the first n tokens; the token at a later index i has i + delta in all directions."""

    first: NDArray[np.int64]
    delta: int

    def at(self, start: int, count: int) -> NDArray[np.int64]:
        """Positions [3, count] of the tokens from index `start` on."""
        later = np.arange(max(start, self.first.shape[1]), start + count) + self.delta
        return np.concatenate([self.first[:, start : start + count], np.broadcast_to(later, (3, len(later)))], axis=1)


def grid_positions(
    images: Sequence[ImageMetadata],
    places: Sequence[NDArray[np.int64]],
    merge_size: int,
    tokens_per_second: float = 0.0,
) -> GridPositions:
    """Return the positions of a prompt. ValueError when the grid of an image does not fit its tokens.

    `places[i]` are the indices of the tokens that stand for image i.
    """
    parts: list[NDArray[np.int64]] = [np.empty((3, 0), np.int64)]
    index = 0
    position = 0
    for image, indices in zip(images, places, strict=True):
        height, width = _sides(image, len(indices), merge_size)
        pace = _pace(image, tokens_per_second)
        for run in np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1):
            parts.append(_text(position, int(run[0]) - index))
            position += int(run[0]) - index
            if len(run) % (height * width):
                raise ValueError(f"a run of {len(run)} tokens cuts the frames of a video of {height} x {width} tokens")
            parts.append(position + _grid(len(run) // (height * width), height, width, pace))
            position += max(height, width)
            index = int(run[-1]) + 1
    # The time of a video may have counted further. transformers goes on from the last token, not from the latest.
    return GridPositions(np.concatenate(parts, axis=1).astype(np.int64), position - index)


def _text(position: int, count: int) -> NDArray[np.int64]:
    return np.broadcast_to(position + np.arange(count), (3, count))


def _grid(frames: int, height: int, width: int, pace: np.float32) -> NDArray[np.int64]:
    """Positions of an image's tokens from 0 on; `pace` are those of a frame."""
    time = (np.arange(frames, dtype=np.float32) * pace).astype(np.int64)
    axes = np.meshgrid(time, np.arange(height), np.arange(width), indexing="ij")
    return np.stack(axes).reshape(3, -1)


def _pace(image: ImageMetadata, tokens_per_second: float) -> np.float32:
    seconds = image.side_arrays.get(SECONDS)
    if not image.is_video or seconds is None or not tokens_per_second:
        return np.float32(1)
    value = float(seconds.reshape(-1)[0]) if seconds.size == 1 else -1.0
    if not 0 < value < np.inf:
        raise ValueError(f"{SECONDS} must be one number above 0, got {seconds.tolist()}")
    return np.float32(tokens_per_second) * np.float32(value)


def _sides(image: ImageMetadata, count: int, merge_size: int) -> tuple[int, int]:
    """Tokens along each side of an image, or of a frame."""
    name = VIDEO_GRID if image.is_video else GRID
    grid = image.side_arrays.get(name)
    if grid is None or grid.size != 3:
        raise ValueError(f"extras of an image must have {name} with three numbers, got {sorted(image.extras)}")
    frames, height, width = (int(n) for n in grid.reshape(-1))
    tokens = frames * (height // merge_size) * (width // merge_size)
    if tokens != count or tokens < 1:
        raise ValueError(f"{name} {[frames, height, width]} makes {tokens} tokens, and {count} stand for the image")
    return height // merge_size, width // merge_size
