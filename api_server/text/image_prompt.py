"""Puts images into prompts: the tokens that stand for each, and the places where they lie.

Knows the texts and tokens that the model's image processor writes; knows no template and no pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from api_server.errors import RequestFailed, invalid
from api_server.media.images import ProcessedImage, Vision


@dataclass(frozen=True)
class PlacedImage:
    """An image of a prompt, and the positions [start, end) that stand for it."""

    start: int
    end: int
    image: ProcessedImage


@dataclass(frozen=True)
class Pictures:
    """The images of one prompt, in order; none for a text to a model with eyes."""

    vision: Vision
    images: Sequence[ProcessedImage] = ()
    # The client's name of the prompt.
    field: str = "messages"

    def expanded(self, parts: Sequence[str]) -> list[str]:
        """The parts of a text with the run of each image for its placeholder. Raises RequestFailed(INVALID)."""
        vision = self.vision
        count = sum(part.count(vision.placeholder) for part in parts)
        if count != len(self.images):
            raise self._miscounted(count)
        runs = iter(self.images)
        found: list[str] = []
        left = count
        for part in parts:
            first, *others = part.split(vision.placeholder)
            left -= len(others)
            pieces = [first]
            for i, text in enumerate(others):
                is_last = left == 0 and i == len(others) - 1
                pieces += [next(runs).run, vision.behind_images if is_last else "", text]
            found.append("".join(pieces))
        if count:
            found[-1] += vision.behind_prompt
        return found

    def expanded_ids(
        self, ids: NDArray[np.int32], token_of: Callable[[str], int | None], ids_of: Callable[[str], list[int]]
    ) -> NDArray[np.int32]:
        """Token ids with the run of each image for its placeholder, unless they have the runs already."""
        if self.images and int((ids == self.vision.token_id).sum()) == sum(map(self._length, self.images)):
            return ids
        placeholder = token_of(self.vision.placeholder)
        places = np.flatnonzero(ids == placeholder)
        if len(places) != len(self.images):
            raise self._miscounted(len(places))
        pieces: list[NDArray[np.int32]] = []
        start = 0
        for place, image in zip(places.tolist(), self.images, strict=True):
            pieces += [ids[start:place], np.array(ids_of(image.run), np.int32)]
            start = place + 1
        return np.concatenate([*pieces, ids[start:]])

    def placed(self, ids: NDArray[np.int32]) -> tuple[PlacedImage, ...]:
        """The images with their places among the tokens. Raises RequestFailed when the tokens have others."""
        places = np.flatnonzero(ids == self.vision.token_id)
        lengths = list(map(self._length, self.images))
        if len(places) != sum(lengths):
            raise invalid(
                f"{self.field} has {len(places)} tokens for the features of images, and its {len(self.images)} images "
                f"give {sum(lengths)}: leave the text {self.vision.token} out of it",
                self.field,
            )
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        return tuple(
            PlacedImage(int(places[end - length]), int(places[end - 1]) + 1, image)
            for end, length, image in zip(ends, lengths, self.images, strict=True)
        )

    def _length(self, image: ProcessedImage) -> int:
        return image.run.count(self.vision.token)

    def _miscounted(self, count: int) -> RequestFailed:
        return invalid(
            f"{self.field} has {count} places for images ({self.vision.placeholder}) and the request has "
            f"{len(self.images)} images: give one place for each",
            self.field,
        )
