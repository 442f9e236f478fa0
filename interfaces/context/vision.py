"""A text context with images in its prompt, and chunks that never cut through an image."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interfaces.context.text import TextContext
from interfaces.wire.equality import EqualByValue
from interfaces.wire.shared_memory import Segments, Shareable, mapped


@dataclass(kw_only=True, eq=False)
class ImageMetadata(EqualByValue):
    """An image and the prompt positions [start_idx, end_idx) that stand for it.

    `pixel_values` are float32, or bfloat16 bits as uint16; on the way to a worker they may stand in shared memory, and
    `pixels` are they in either case. `image_hash` names the content for the prefix cache.
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
        """Raises SharedMemoryError when the request that the image belongs to has ended."""
        return mapped(self.pixel_values)

    def __repr__(self) -> str:
        return (
            f"ImageMetadata(start_idx={self.start_idx}, end_idx={self.end_idx}, "
            f"pixel_values={self.pixel_values.shape}, image_hash={self.image_hash})"
        )


@dataclass(kw_only=True, eq=False)
class TextAndVisionContext(TextContext):
    """`images` in the order of the prompt, with tokens between them; each begins and ends with a vision token.

    Without a chunk the position is behind all tokens, so it can be inside an image only where `tokens` itself was
    chunked there.
    """

    vision_token_ids: list[int]
    images: list[ImageMetadata] = field(default_factory=list)

    __hash__ = TextContext.__hash__

    def __post_init__(self) -> None:
        super().__post_init__()
        for before, after in zip(self.images, self.images[1:], strict=False):
            if after.start_idx <= before.end_idx:
                raise ValueError(
                    f"images must be in order with tokens between them: one ends at {before.end_idx}, "
                    f"the next begins at {after.start_idx}"
                )
        for image in self.images:
            self._check_image(image)

    def _check_image(self, image: ImageMetadata) -> None:
        if image.end_idx > len(self.tokens):
            raise ValueError(f"an image ends at {image.end_idx}, behind the {len(self.tokens)} tokens")
        for position in (image.start_idx, image.end_idx - 1):
            if self.tokens[position] not in self.vision_token_ids:
                raise ValueError(
                    f"the token at {position} belongs to an image, but {self.tokens[position]} is none of the vision "
                    f"token ids {self.vision_token_ids}"
                )

    def share_arrays(self, segments: Segments) -> None:
        for image in self.images:
            image.pixel_values = segments.hold(image.pixel_values)

    def unshare_arrays(self, segments: Segments) -> None:
        for image in self.images:
            image.pixel_values = segments.give_back(image.pixel_values)

    @property
    def image_idx(self) -> int:
        """Index of the first image with tokens that are not processed; their number when there is none."""
        processed = self.tokens.processed_length
        return next((i for i, image in enumerate(self.images) if image.end_idx > processed), len(self.images))

    @property
    def next_images(self) -> list[ImageMetadata]:
        return self.images[self.image_idx :]

    @property
    def needs_vision_encoding(self) -> bool:
        return self.image_idx < len(self.images)

    @property
    def image_token_indices(self) -> NDArray[np.int32]:
        """Positions of the vision tokens within the images."""
        positions = [np.arange(image.start_idx, image.end_idx) for image in self.images]
        inside = np.concatenate(positions) if positions else np.empty(0, np.int64)
        return inside[np.isin(self.tokens.all[inside], self.vision_token_ids)].astype(np.int32)

    def compute_image_aligned_idx(self, idx: int) -> int:
        """The start of the image that position `idx` belongs to, else `idx`."""
        image = self._image_at(idx)
        return idx if image is None else image.start_idx

    def chunk(self, chunk_size: int) -> None:
        """Leaves about `chunk_size` tokens active: fewer where an image would be cut, more where one alone is longer.

        Nothing happens when all that is active is taken.
        """
        start = self.tokens.current_position - self.tokens.active_length
        end = self.compute_image_aligned_idx(start + chunk_size)
        if end <= start:
            image = self._image_at(start)
            end = start + chunk_size if image is None else image.end_idx
        if end < self.tokens.current_position:
            self.tokens.chunk(end - start)

    def _image_at(self, position: int) -> ImageMetadata | None:
        return next((image for image in self.images if image.start_idx <= position < image.end_idx), None)
