"""A text context with images in its prompt, and chunks that never cut through an image."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from interfaces.context.images import ImageMetadata
from interfaces.context.text import TextContext
from interfaces.wire.shared_memory import Segments


@dataclass(kw_only=True, eq=False)
class TextAndVisionContext(TextContext):
    """A text context with images, in the order of the prompt. One may follow another without a token between them.

    Each image begins and ends with a vision token. Without a chunk the position is behind all tokens, so it can be
    inside an image only where `tokens` itself was chunked there.
    """

    wire_tag: ClassVar[str] = "vision"

    vision_token_ids: list[int]
    images: list[ImageMetadata] = field(default_factory=list)

    __hash__ = TextContext.__hash__

    def __post_init__(self) -> None:
        super().__post_init__()
        for before, after in zip(self.images, self.images[1:], strict=False):
            if after.start_idx < before.end_idx:
                raise ValueError(
                    f"images must be in the order of the prompt and share no token: one ends at {before.end_idx}, "
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
            image.share_arrays(segments)

    def unshare_arrays(self, segments: Segments) -> None:
        for image in self.images:
            image.unshare_arrays(segments)

    @property
    def image_idx(self) -> int:
        """The index of the first image with tokens that are not processed; the number of images when there is none."""
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
        """The positions of the vision tokens within the images."""
        positions = [np.arange(image.start_idx, image.end_idx) for image in self.images]
        inside = np.concatenate(positions) if positions else np.empty(0, np.int64)
        return inside[np.isin(self.tokens.all[inside], self.vision_token_ids)].astype(np.int32)

    def compute_image_aligned_idx(self, idx: int) -> int:
        """Return the start of the image that position `idx` belongs to, else `idx`."""
        image = self._image_at(idx)
        return idx if image is None else image.start_idx

    def chunk(self, chunk_size: int) -> None:
        """Leave about `chunk_size` tokens active: fewer where an image would be cut, more where one alone is longer.

        Nothing happens when all active tokens are taken.
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
