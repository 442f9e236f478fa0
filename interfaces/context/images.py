"""An image or a video of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interfaces.wire.equality import EqualByValue
from interfaces.wire.shared_memory import Segments, Shareable, mapped


@dataclass(kw_only=True, eq=False)
class ImageMetadata(EqualByValue):
    """An image, or a video, and the prompt positions [start_idx, end_idx) that stand for it.

    `pixel_values` are float32, or bfloat16 bits as uint16, as the model's image processor gives them for one image.
    `extras` holds what else it gives, such as `image_grid_thw`, under the names that the model takes. On the way to a
    worker all arrays may stand in shared memory; `pixels` and `side_arrays` read them in either case. `image_hash`
    names the content for the caches. The first and the last token of the span stand for a part of the image; between
    them there may be tokens that separate its tiles, or the frames of a video. `is_video`: the model takes it as a
    video, and `pixel_values` are its `pixel_values_videos`.
    """

    start_idx: int
    end_idx: int
    pixel_values: Shareable
    image_hash: int | None = None
    extras: dict[str, Shareable] = field(default_factory=dict)
    is_video: bool = False

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

    @property
    def side_arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of `extras`. Raises SharedMemoryError as `pixels`."""
        return {name: mapped(array) for name, array in self.extras.items()}

    def share_arrays(self, segments: Segments) -> None:
        """Put large arrays into shared memory, until `unshare_arrays`."""
        self.pixel_values = segments.hold(self.pixel_values)
        self.extras = {name: segments.hold(array) for name, array in self.extras.items()}

    def unshare_arrays(self, segments: Segments) -> None:
        """Make the arrays this process's own again; no effect where they are."""
        self.pixel_values = segments.give_back(self.pixel_values)
        self.extras = {name: segments.give_back(array) for name, array in self.extras.items()}

    def __repr__(self) -> str:
        return (
            f"ImageMetadata(start_idx={self.start_idx}, end_idx={self.end_idx}, "
            f"pixel_values={self.pixel_values.shape}, image_hash={self.image_hash})"
        )
