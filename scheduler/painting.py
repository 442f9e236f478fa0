"""The images that one worker paints: which are on it, how far they are, and which it has to drop.

Every image takes one denoising step in each pass, so a new one joins between two passes and one that is not wanted any
more leaves there. Each has a number of its own, which no other image gets: results of passes that were sent before
it left name nothing else. Knows pieces of one image each and the passes of one worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from interfaces import PaintingContext, PixelJoin, PixelResult, PooledValues
from scheduler.oneshot_request import Piece

# Images that a worker paints at once.
MAX_IMAGES = 16
# No image joins when those that are painted have so many pixels: on a CPU a pass takes as much longer as there are
# images in it, and on a GPU it needs more memory. The one that joins last may go beyond: a pass has fewer pixels than
# these and those of the largest image together.
PIXELS_ON_CPU = 1 << 20
PIXELS_ON_GPU = 1 << 22
# Bytes of the kept steps of the images on a worker. An image for which there is no room keeps its last one.
MOST_KEPT_BYTES = 256 << 20
# Parts of an image's passes after which its progress is recorded.
_PARTS = 4


@dataclass(eq=False, slots=True)
class Painted:
    """An image on a worker. `total` passes make it, 0 as long as the worker has not said so."""

    piece: Piece
    passes: int = 0
    total: int = 0

    @property
    def context(self) -> PaintingContext:
        context = self.piece.request.context
        assert isinstance(context, PaintingContext)
        return context

    @property
    def kept_bytes(self) -> int:
        """The bytes of its kept step."""
        kept = self.piece.request.kept.get(self.piece.first)
        return 0 if kept is None else len(kept.state)

    def advance(self) -> bool:
        """Count a pass. Returns whether its progress is worth a line in the request's log."""
        # The worker begins anew where it cannot read the kept step.
        self.passes = min(self.passes + 1, self.total) if self.total else self.passes + 1
        each = max(1, self.total // _PARTS)
        return 0 < self.passes < self.total and self.passes % each == 0


class Painting:
    """The images of one worker, by number, in the order in which they came."""

    def __init__(self, device: str) -> None:
        self._most_pixels = PIXELS_ON_CPU if device.startswith("cpu") else PIXELS_ON_GPU
        self._images: dict[int, Painted] = {}
        # The images of each pass in flight, and how many of them join in it, by the pass's number.
        self._passes: dict[int, tuple[list[int], int]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._images)

    @property
    def pieces(self) -> list[Piece]:
        return [painted.piece for painted in self._images.values()]

    @property
    def has_isolated(self) -> bool:
        """Whether an image is painted that must be alone."""
        return any(painted.piece.isolated for painted in self._images.values())

    @property
    def has_room(self) -> bool:
        """Whether one more image may join."""
        if not self._images:
            return True
        pixels = sum(painted.context.pixels for painted in self._images.values())
        return len(self._images) < MAX_IMAGES and pixels < self._most_pixels and not self.has_isolated

    def join(self, piece: Piece, remote: bool = False) -> PixelJoin:
        """Add an image, which goes on from the step of it that is kept, if there is one.

        Returns what the worker has to know of it: without shared memory if it is `remote`.
        """
        number = self._next
        self._next += 1
        kept = piece.request.kept.get(piece.first)
        painted = Painted(piece, 0 if kept is None else kept.taken)
        self._images[number] = painted
        context = painted.context.part(piece.first, piece.end)
        state = b"" if kept is None else kept.state
        return PixelJoin(number, context.inline() if remote else context, state)

    def sent(self, number: int, joining: int) -> NDArray[np.int32]:
        """Note that pass `number` takes a step of all images, the last `joining` of which join in it. Returns them."""
        rows = list(self._images)
        self._passes[number] = (rows, joining)
        return np.array(rows, np.int32)

    def answered(self, number: int, totals: list[int]) -> list[Painted]:
        """Count pass `number`, and note how many passes those that joined in it take.

        Returns the images whose progress is worth a line in their requests' logs.
        """
        rows, joining = self._passes.pop(number)
        for row, total in zip(rows[len(rows) - joining :], totals, strict=False):
            if row in self._images:
                self._images[row].total = total
        here = [self._images[row] for row in rows if row in self._images]
        return [painted for painted in here if painted.advance() and not painted.piece.request.ended]

    def failed(self, result: PixelResult) -> Iterator[tuple[Piece, str]]:
        """Remove the images that failed. Yields those that are still wanted, and the reasons."""
        for row, why in result.errors.items():
            painted = self._images.pop(row, None)
            if painted is not None and not painted.piece.request.ended:
                yield painted.piece, why

    def previews(self, result: PixelResult) -> Iterator[tuple[Piece, int, PooledValues]]:
        """Yield the images that are still wanted and have a preview, its number, and its values."""
        for preview in result.previews:
            painted = self._images.get(preview.row)
            if painted is None or painted.piece.request.ended:
                preview.values.discard()
            else:
                yield painted.piece, preview.number, preview.values

    def keep(self, result: PixelResult) -> None:
        """Keep the newest steps of the images that are still wanted, with their requests."""
        for kept in result.kept:
            painted = self._images.get(kept.row)
            if painted is None or painted.piece.request.ended:
                continue
            held = sum(other.kept_bytes for other in self._images.values() if other is not painted)
            if held + len(kept.state) <= MOST_KEPT_BYTES:
                painted.piece.request.kept[painted.piece.first] = kept

    def finished(self, result: PixelResult) -> Iterator[tuple[Piece, PooledValues]]:
        """Remove the images that are done. Yields those that are still wanted, and their values."""
        for row, values in zip(result.finished.tolist(), result.images, strict=False):
            painted = self._images.pop(row, None)
            if painted is not None:
                painted.piece.request.kept.pop(painted.piece.first, None)
            if painted is None or painted.piece.request.ended:
                values.discard()
            else:
                yield painted.piece, values

    def take_dropped(self) -> list[int]:
        """Remove the images whose requests have ended. Returns their numbers, for the worker."""
        dropped = [row for row, painted in self._images.items() if painted.piece.request.ended]
        for row in dropped:
            del self._images[row]
        return dropped

    def clear(self) -> list[Piece]:
        """Remove all images of a worker that is lost. Returns their pieces."""
        pieces = self.pieces
        self._images.clear()
        self._passes.clear()
        return pieces


def fewest(paintings: Iterable[Painting | None]) -> int:
    """Return the number of images of the worker that has the fewest, of those with room: the next one belongs there."""
    return min((len(painting) for painting in paintings if painting is not None and painting.has_room), default=0)
