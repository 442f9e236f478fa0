"""An image of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interfaces.wire.equality import EqualByValue
from interfaces.wire.shared_memory import Shareable, mapped


@dataclass(kw_only=True, eq=False)
class ImageMetadata(EqualByValue):
    """An image and the prompt positions [start_idx, end_idx) that stand for it.

    `pixel_values` are float32, or bfloat16 bits as uint16; on the way to a worker they may stand in shared memory, and
    `pixels` gives the array in either case. `image_hash` names the content for the prefix cache.
    """

    start_idx: int
    end_idx: int
    pixel_values: Shareable
    image_hash: int | None = None

    def __post_init__(self) -> None:
        if self.start_idx < 0:
            raise ValueError(f"start_idx must be at least 0, got {self.start_idx}")
        if self.end_idx <= self.start_idx:
            raise ValueError(f"end_idx must be above start_idx {self.start_idx}, got {self.end_idx}")
        if np.dtype(self.pixel_values.dtype) not in (np.float32, np.uint16):
            raise ValueError(f"pixel_values must be float32 or uint16 (bfloat16 bits), got {self.pixel_values.dtype}")

    @property
    def pixels(self) -> NDArray[Any]:
        """The pixel array. Raises SharedMemoryError when the request that the image belongs to has ended."""
        return mapped(self.pixel_values)

    def __repr__(self) -> str:
        return (
            f"ImageMetadata(start_idx={self.start_idx}, end_idx={self.end_idx}, "
            f"pixel_values={self.pixel_values.shape}, image_hash={self.image_hash})"
        )
