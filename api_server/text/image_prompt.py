"""Puts images, videos and sounds into prompts: the tokens that stand for each, and the places where they lie.

Knows the texts and tokens that the model's processor writes; knows no template and no pixel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from api_server.errors import invalid
from api_server.media.images import ProcessedImage
from api_server.media.processors import Vision


@dataclass(frozen=True)
class PlacedImage:
    """An image of a prompt, and the positions [start, end) that stand for it."""

    start: int
    end: int
    image: ProcessedImage


@dataclass(frozen=True)
class Pictures:
    """The images, or the sounds, of one prompt, in order; none for a text to a model with eyes or ears."""

    vision: Vision
    images: Sequence[ProcessedImage] = ()
    # The client's name of the prompt.
    field: str = "messages"

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the positions that features take."""
        return tuple(sorted({self._token_id(image) for image in self.images}))

    def arranged(self, parts: Sequence[str]) -> Pictures:
        """The same images in the order of their placeholders in a text. Raises RequestFailed(INVALID)."""
        self._check_counts(lambda placeholder: sum(part.count(placeholder) for part in parts))
        kinds = {name: iter(images) for name, images in self._by_placeholder().items()}
        pattern = re.compile("|".join(map(re.escape, kinds)))
        return replace(self, images=[next(kinds[name]) for part in parts for name in pattern.findall(part)])

    def expanded(self, parts: Sequence[str]) -> list[str]:
        """The parts of a text with the run of each image for its placeholder. Raises RequestFailed(INVALID)."""
        images = self.arranged(parts).images
        pattern = re.compile("|".join(map(re.escape, self._by_placeholder())))
        runs = [image.run for image in images]
        if runs:
            runs[-1] += self.vision.behind_images
        following = iter(runs)
        found = [pattern.sub(lambda _: next(following), part) for part in parts]
        if runs:
            found[-1] += self.vision.behind_prompt
        return found

    def arranged_ids(self, ids: NDArray[np.int32], token_of: Callable[[str], int | None]) -> Pictures:
        """The same images in the order of their placeholders among token ids, or as they are if there are runs."""
        kinds = {token_of(name): iter(images) for name, images in self._by_placeholder().items()}
        if self._has_runs(ids):
            looks = {(image.is_clip, self._token_id(image)) for image in self.images}
            if len(looks) > 1 and len(self.token_ids) == 1:
                message = (
                    f"{self.field} has runs of images and of videos, which cannot be told apart: send placeholders, "
                    "and in a session images alone or videos alone"
                )
                raise invalid(message, self.field)
            return self
        self._check_counts(lambda name: 0 if token_of(name) is None else int((ids == token_of(name)).sum()))
        places = ids[np.isin(ids, [token for token in kinds if token is not None])].tolist()
        return replace(self, images=[next(kinds[token]) for token in places])

    def expanded_ids(
        self, ids: NDArray[np.int32], token_of: Callable[[str], int | None], ids_of: Callable[[str], list[int]]
    ) -> NDArray[np.int32]:
        """Token ids with the run of each image for its placeholder, unless they have the runs already."""
        images = self.arranged_ids(ids, token_of).images
        if self._has_runs(ids):
            return ids
        tokens = [token_of(name) for name in self._by_placeholder()]
        pieces: list[NDArray[np.int32]] = []
        start = 0
        places = np.flatnonzero(np.isin(ids, [token for token in tokens if token is not None])).tolist()
        for place, image in zip(places, images, strict=True):
            pieces += [ids[start:place], np.array(ids_of(image.run), np.int32)]
            start = place + 1
        return np.concatenate([*pieces, ids[start:]])

    def among(self, ids: NDArray[np.int32]) -> list[bool]:
        """Whether token ids have the run of each image; they begin with all. Raises RequestFailed if one is cut."""
        left = {token: int((ids == token).sum()) for token in self.token_ids}
        found = []
        for image in self.images:
            token = self._token_id(image)
            found.append(left[token] > 0)
            left[token] -= self._length(image) if left[token] else 0
        if any(left.values()):
            raise invalid(f"{self.field} cuts the tokens of an image: choose another offset", self.field)
        return found

    def _has_runs(self, ids: NDArray[np.int32]) -> bool:
        """Whether token ids have as many tokens for features as the images give."""
        needed: dict[int, int] = {}
        for image in self.images:
            token = self._token_id(image)
            needed[token] = needed.get(token, 0) + self._length(image)
        return bool(needed) and all(int((ids == token).sum()) == count for token, count in needed.items())

    def placed(self, ids: NDArray[np.int32]) -> tuple[PlacedImage, ...]:
        """The images with their places among the tokens. Raises RequestFailed when the tokens have others."""
        tokens = {self._token_id(image) for image in self.images} | {self.vision.token_id}
        found = [placed for token in sorted(tokens) for placed in self._placed_at(ids, token)]
        return tuple(sorted(found, key=lambda placed: placed.start))

    def _placed_at(self, ids: NDArray[np.int32], token: int) -> list[PlacedImage]:
        """The images whose features take this token."""
        places = np.flatnonzero(ids == token)
        images = [image for image in self.images if self._token_id(image) == token]
        lengths = list(map(self._length, images))
        if len(places) != sum(lengths):
            name = self.vision.token if token == self.vision.token_id else self.vision.video_token
            raise invalid(
                f"{self.field} has {len(places)} tokens for the features of {self._what}, and its {len(images)} "
                f"{self._what} give {sum(lengths)}: leave the text {name} out of it",
                self.field,
            )
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        return [
            PlacedImage(int(places[end - length]), int(places[end - 1]) + 1, image)
            for end, length, image in zip(ends, lengths, images, strict=True)
        ]

    @property
    def _what(self) -> str:
        return "sounds" if self.vision.is_sound else "images"

    def _by_placeholder(self) -> dict[str, list[ProcessedImage]]:
        """Images, and videos if there are any, by the text that stands for each."""
        found = {self.vision.placeholder: [image for image in self.images if not image.is_clip]}
        clips = [image for image in self.images if image.is_clip]
        return found | {self.vision.video_placeholder: clips} if clips else found

    def _token_id(self, image: ProcessedImage) -> int:
        return self.vision.video_token_id if image.is_clip else self.vision.token_id

    def _length(self, image: ProcessedImage) -> int:
        return image.run.count(self.vision.video_token if image.is_clip else self.vision.token)

    def _check_counts(self, count_of: Callable[[str], int]) -> None:
        for placeholder, images in self._by_placeholder().items():
            count = count_of(placeholder)
            if count != len(images):
                what = "videos" if images and images[0].is_clip else self._what
                raise invalid(
                    f"{self.field} has {count} places for {what} ({placeholder}) and the request has {len(images)} "
                    f"{what}: give one place for each",
                    self.field,
                )
