"""Cuts a stream of codes into windows for the codec: the first ones are short, so that the first sound comes early.

The frames around a window are decoded with it and left out, so longer windows take less work. Each window is so many
times as long as the one before, until what surrounds it is a small part of it.

Where windows end depends on the number of codes alone, never on when they came: the same codes give the same windows.
Knows frames; knows neither tokens nor sound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from interfaces import CodecFacts

# Frames of the first window, and how many times longer each next one is.
_FIRST_FRAMES = 2
_LONGER = 2
# Frames of all later windows: at least so many, and at best so many times the frames around them, in so many seconds.
_LEAST_FRAMES = 25
_SURROUNDINGS = 4
_MOST_SECONDS = 1.5


@dataclass(frozen=True)
class Window:
    """Codes of frames, one after another. The samples of `left` and `right` frames are left out."""

    codes: NDArray[np.int32]
    first_frame: int
    left: int
    right: int


def longest(codec: CodecFacts) -> int:
    """Frames of the windows of a long sound."""
    worth = _SURROUNDINGS * (codec.left + codec.right)
    return max(_LEAST_FRAMES, min(worth, int(_MOST_SECONDS * codec.sample_rate / codec.frame_samples)))


class Windows:
    """The windows of one sound. `width` is the number of codes of a frame."""

    def __init__(self, width: int, codec: CodecFacts, heard: Sequence[int] = ()) -> None:
        """`heard` are codes before the sound, of which it is the continuation."""
        self._width = width
        self._codec = codec
        self._codes: list[int] = list(heard)
        # Frames that no window has to give any more.
        self._done = len(heard) // width
        self._length = _FIRST_FRAMES
        self._longest = longest(codec)

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
            end = self._done + self._length
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
            end = min(self._done + self._longest, self.frames)
            yield self._window(end, min(self._codec.right, self.frames - end))

    def _window(self, end: int, right: int) -> Window:
        begin = self._done
        left = 0 if self._codec.is_whole else min(self._codec.left, begin)
        codes = self._codes[(begin - left) * self._width : (end + right) * self._width]
        self._done = end
        self._length = min(_LONGER * self._length, self._longest)
        return Window(np.array(codes, np.int32), begin - left, left, right)
