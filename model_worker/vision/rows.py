"""The images of running rows: the vectors in place of their tokens, and how these tokens are positioned and seen.

Knows rows, images and features. Does not know the model, nor when an image is encoded: what is missing when a step
needs it is encoded at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from interfaces import ImageMetadata, Join
from model_worker.rows import PackedStep
from model_worker.vision.encoder import Encoder, EncoderCache, FeatureKey, Features
from model_worker.vision.family import Sight
from model_worker.vision.positions import GridPositions, grid_positions

_NO_POSITIONS = GridPositions(np.empty((3, 0), np.int64), 0)


@dataclass(slots=True, eq=False)
class ImageRow:
    """The images of one row. `places[i]` are the indices of the tokens that stand for image i."""

    row: int
    images: list[ImageMetadata]
    places: list[NDArray[np.int64]]
    # Of each image, until it is computed; None: not encoded yet, or not needed any more.
    features: list[Features | None]
    positions: GridPositions
    prompt_len: int
    # Number of the step in which it joined.
    joined: int
    # Images that are still to be encoded elsewhere.
    missing: list[int] = field(default_factory=list)
    # That encoding for it has taken.
    seconds: float = 0.0
    # The handle of its adapter; 0: none. `content` is that of an adapter that changes features, once it has come.
    adapter: int = 0
    content: str = ""

    @property
    def end(self) -> int:
        """Index behind the last image."""
        return self.images[-1].end_idx


class ImageRows:
    """The rows with images of one worker, and the features that are kept for images that come again."""

    def __init__(self, encoder: Encoder, cache: EncoderCache) -> None:
        self.encoder = encoder
        self.cache = cache
        # Takes a row, and the number of its tokens that need no computing. None: images are encoded when a row joins.
        self.encode_later: Callable[[ImageRow, int], None] | None = None
        # Takes a row whose images cannot be used, and the reason.
        self.fail_later: Callable[[ImageRow, str], None] | None = None
        self._rows: dict[int, ImageRow] = {}

    def join(self, join: Join, step: int) -> None:
        """Take the images of a row that joins in this step.

        ValueError when they cannot be encoded, unless there is `fail_later`; then zeros stand for them.
        """
        row = ImageRow(
            row=join.row,
            images=join.images,
            places=[_places(join.tokens, image) for image in join.images],
            features=[None] * len(join.images),
            positions=_NO_POSITIONS,
            prompt_len=join.prompt_len,
            joined=step,
            adapter=join.adapter,
            content=self.encoder.adapters.content(join.adapter),
        )
        self._rows[join.row] = row
        try:
            if self.encoder.family.grid_positions:
                row.positions = grid_positions(
                    join.images, row.places, self.encoder.merge_size, self.encoder.tokens_per_second
                )
            if self.encode_later is not None:
                self.encode_later(row, join.start)
                return
            for index, image in enumerate(join.images):
                if image.end_idx > join.start:
                    self.encode(row, index)
        except ValueError as error:
            row.features = [np.zeros((len(places), self.encoder.hidden_size), np.float32) for places in row.places]
            if self.fail_later is None:
                raise
            self.fail_later(row, str(error))

    def drop(self, row: int) -> None:
        self._rows.pop(row, None)

    def clear(self) -> None:
        self._rows.clear()

    def has(self, row: ImageRow) -> bool:
        """Whether it runs still."""
        return self._rows.get(row.row) is row

    def runs(self, row: int, joined: int) -> bool:
        """Whether the row is that which joined in this step, and still needs its images."""
        known = self._rows.get(row)
        return known is not None and known.joined == joined

    def encode(self, row: ImageRow, index: int) -> None:
        """Encode an image of a row, unless its features are kept. ValueError says what is wrong with the image."""
        features = self.cache.get(self.key(row, index))
        if features is None:
            features = self.encoder.encoded(row.images[index], row.adapter, row.content)
            assert features is not None
        self.put(row, index, features)

    def key(self, row: ImageRow, index: int) -> FeatureKey | None:
        """Return what the features of an image are kept by; None for an image that equals no other."""
        image_hash = row.images[index].image_hash
        return None if image_hash is None else (row.content, image_hash)

    def put(self, row: ImageRow, index: int, features: Features) -> None:
        """Take the features of an image. ValueError when they are not one vector for each of its tokens."""
        if len(features) != len(row.places[index]):
            raise ValueError(
                f"the model makes {len(features)} vectors of an image, and {len(row.places[index])} tokens stand for it"
            )
        self.cache.put(self.key(row, index), features)
        row.features[index] = features

    def fill(self, packed: PackedStep) -> PackedStep:
        """Put what the images of the step's rows bring into its columns."""
        rows = packed.rows.tolist()
        if not self._rows or not any(row in self._rows for row in rows):
            return packed
        parts = []
        start = packed.kv_len - packed.ntok
        for row, first, count, end in zip(rows, start.tolist(), packed.ntok, np.cumsum(packed.ntok), strict=True):
            if row in self._rows:
                parts.append(_Part(self._rows[row], first, first + int(count), int(end - count)))
        tokens, embeddings = self._embedded(packed, parts)
        self._forget_computed(parts)
        return replace(
            packed,
            tokens=tokens,
            embeddings=embeddings,
            angles=_angles(packed, parts) if self.encoder.family.grid_positions else None,
            seen=_seen(packed, parts, self.encoder.family.sight),
        )

    def _forget_computed(self, parts: list[_Part]) -> None:
        """Drop what steps before this one have computed."""
        for part in parts:
            for index, image in enumerate(part.row.images):
                if image.end_idx <= part.start:
                    part.row.features[index] = None
            if part.start >= part.row.end and not self.encoder.family.grid_positions:
                self.drop(part.row.row)

    def _embedded(
        self, packed: PackedStep, parts: list[_Part]
    ) -> tuple[NDArray[np.int32], tuple[NDArray[np.int64], NDArray[np.float32]] | None]:
        """The tokens, without the ids of placeholders, and the vectors in their place."""
        places = []
        vectors = []
        for part in parts:
            for index, indices in enumerate(part.row.places):
                first, end = np.searchsorted(indices, [part.start, part.stop])
                if first == end:
                    continue
                if part.row.features[index] is None:
                    self.encode(part.row, index)
                features = part.row.features[index]
                assert features is not None
                places.append(indices[first:end] - part.start + part.offset)
                vectors.append(features[first:end])
        if not places:
            return packed.tokens, packed.embeddings
        where = np.concatenate(places)
        tokens = packed.tokens.copy()
        tokens[where] = self.encoder.pad_token_id
        # A row that was refused has zeros, without the levels of the others.
        width = max(part.shape[1] for part in vectors)
        what = np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in vectors])
        if packed.embeddings is None:
            return tokens, (where, what)
        given = np.zeros((len(packed.embeddings[0]), what.shape[1]), np.float32)
        given[:, : packed.embeddings[1].shape[1]] = packed.embeddings[1]
        return tokens, (np.concatenate([packed.embeddings[0], where]), np.concatenate([given, what]))


def _places(tokens: NDArray[np.int32], image: ImageMetadata) -> NDArray[np.int64]:
    """Return the indices of the tokens that stand for an image, which are those equal to its first one."""
    span = tokens[image.start_idx : image.end_idx]
    return image.start_idx + np.flatnonzero(span == span[0])


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Tokens `start` to `stop` of a row, which stand in the step from `offset` on."""

    row: ImageRow
    start: int
    stop: int
    offset: int


def _angles(packed: PackedStep, parts: list[_Part]) -> NDArray[np.int64]:
    """Positions of all tokens: one row of them where the three directions agree, as they do in text."""
    first = np.repeat(packed.kv_len - np.cumsum(packed.ntok), packed.ntok).astype(np.int64)
    plain = first + np.arange(len(packed.tokens))
    three = np.broadcast_to(plain, (3, len(plain))).copy()
    for part in parts:
        count = part.stop - part.start
        three[:, part.offset : part.offset + count] = part.row.positions.at(part.start, count)
    return three[0] if (three == three[0]).all() else three


def _seen(packed: PackedStep, parts: list[_Part], sight: Sight) -> NDArray[np.int32] | None:
    """First and last key [2, T] that each token sees beside those up to its own; None if there are none."""
    if sight == Sight.CAUSAL:
        return None
    first = np.repeat(packed.kv_len - np.cumsum(packed.ntok), packed.ntok).astype(np.int32)
    own = first + np.arange(len(packed.tokens), dtype=np.int32)
    seen: NDArray[np.int32] = np.stack([own, own])
    changed = False
    for part in parts:
        spans = [(0, part.row.prompt_len)]
        if sight == Sight.IMAGE:
            spans = [(image.start_idx, image.end_idx) for image in part.row.images]
        for start, end in spans:
            begin = max(start, part.start)
            stop = min(end, part.stop)
            if begin < stop:
                changed = True
                tokens = slice(begin - part.start + part.offset, stop - part.start + part.offset)
                seen[1, tokens] = end - 1
                if sight == Sight.PROMPT:
                    seen[0, tokens] = 0
    return seen if changed else None
