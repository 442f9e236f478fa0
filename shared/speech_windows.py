"""Cuts a stream of codes into windows for the codec: the first ones are short, so that the first sound comes early.

Where windows end depends on the number of codes alone, never on when they came: the same codes give the same windows.
Knows frames; knows neither tokens nor sound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from interfaces import CodecFacts

# Frames of the first windows, and of all later ones.
_FIRST_FRAMES = (2, 4, 8, 16)
_FRAMES = 25


@dataclass(frozen=True)
class Window:
    """Codes of frames, one after another. The samples of `left` and `right` frames are left out."""

    codes: NDArray[np.int32]
    first_frame: int
    left: int
    right: int


class Windows:
    """The windows of one sound. `width` is the number of codes of a frame."""

    def __init__(self, width: int, codec: CodecFacts, heard: Sequence[int] = ()) -> None:
        """`heard` are codes before the sound, of which it is the continuation."""
        self._width = width
        self._codec = codec
        self._codes: list[int] = list(heard)
        # Frames that no window has to give any more.
        self._done = len(heard) // width
        self._cut = 0

    @property
    def frames(self) -> int:
        """The number of whole frames."""
        return len(self._codes) // self._width

    def add(self, codes: Sequence[int]) -> None:
        self._codes += codes

    def end_part(self) -> None:
        """Drop the codes of a frame that is not complete: the next ones begin a frame."""
        del self._codes[self.frames * self._width :]

    def ready(self) -> Iterator[Window]:
        """The windows whose surroundings are there."""
        while not self._codec.is_whole:
            end = self._done + (_FIRST_FRAMES[self._cut] if self._cut < len(_FIRST_FRAMES) else _FRAMES)
            if end + self._codec.right > self.frames:
                return
            yield self._window(end, self._codec.right)

    def rest(self) -> Iterator[Window]:
        """The windows of all that is left: nothing follows, or nothing that a codec needs."""
        if self._codec.is_whole:
            if self.frames > self._done:
                yield self._window(self.frames, 0)
            return
        yield from self.ready()
        while self._done < self.frames:
            end = min(self._done + _FRAMES, self.frames)
            yield self._window(end, min(self._codec.right, self.frames - end))

    def _window(self, end: int, right: int) -> Window:
        begin = self._done
        left = 0 if self._codec.is_whole else min(self._codec.left, begin)
        codes = self._codes[(begin - left) * self._width : (end + right) * self._width]
        self._done = end
        self._cut += 1
        return Window(np.array(codes, np.int32), begin - left, left, right)
