"""Messages between an API process and its media process, in msgpack over pipes.

The first message to the media process is a `Start`; it answers with facts or with an error. Then come jobs, each with a
number, and answers in the order of completion.
"""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from interfaces import MESSAGE_THRESHOLD, Shareable, SharedMemoryArray, fill
from shared.resources import usable_cores

# Most images, videos and sound files that are read at once, if there are as many cores.
_MOST_AT_ONCE = 4


# Fields of a Start for sound.
SOUND_FIELDS = frozenset({"mel", "most_seconds", "rate"})


def jobs_at_once() -> int:
    """Number of jobs that the media process does at once: two at least, so that an image need not wait for a video."""
    return max(2, min(_MOST_AT_ONCE, usable_cores()))


class Start(TypedDict, total=False):
    """What the media process loads: a model's image processor, with `mel` what reads sound for a recogniser, and with
    `most_seconds` what reads sound for a model that hears. With `edits` it loads nothing, and reads images that are to
    be painted anew; with `rate` it makes sound files samples of that rate."""

    model: str
    edits: bool
    # Most tokens of an image, and of a video.
    most_tokens: int
    most_video_tokens: int
    # The fields of a `MelForm`.
    mel: dict[str, int]
    # Length of the longest sound.
    most_seconds: float
    rate: int


class Job(TypedDict):
    """One image or video to be processed, or the headers of several images to be read. For a model that hears `image`
    is a sound file.

    `segments` are names that arrays may be written under. `pixels` may have min_pixels and max_pixels. `video` is a
    video file or, with `is_frames`, images that are its frames; of 0 `fps` and `num_frames` the model decides.
    """

    number: int
    measure: list[bytes]
    image: bytes
    video: list[bytes]
    is_frames: bool
    fps: float
    num_frames: int
    detail: str
    pixels: dict[str, int]
    segments: list[str]


class SoundJob(TypedDict):
    """One sound file to be made features, or samples."""

    number: int
    sound: bytes
    most_seconds: float
    segments: list[str]


class EditJob(TypedDict):
    """An image to be read in a size, and the mask for it, or b"". Of `width` 0 the header alone is read."""

    number: int
    picture: bytes
    mask: bytes
    width: int
    height: int
    segments: list[str]


class Answer(TypedDict, total=False):
    """Results of a job. `error` ends a sentence about the image or the sound file; `index` is that of the image in
    `measure`. Of an EditJob it is 0 for the image and 1 for the mask."""

    number: int
    error: str
    index: int
    # Pixels of each image of `measure`.
    counts: list[int]
    run: str
    is_video: bool
    arrays: dict[str, list[Any]]
    # Length of a sound.
    seconds: float
    # Width and height of an image.
    size: list[int]


def packed(array: NDArray[Any], segments: list[str]) -> list[Any]:
    """An array in a message: its name in shared memory or its bytes, with shape and type. Takes a name if it uses one.

    A name whose segment there was no room for is not used again.
    """
    facts = [list(array.shape), array.dtype.str]
    if array.nbytes >= MESSAGE_THRESHOLD and segments:
        name = segments.pop(0)
        if fill(name, array):
            return [name, *facts]
    return [np.ascontiguousarray(array).tobytes(), *facts]


def unpacked(given: list[Any]) -> Shareable:
    """The array of a message, or its placeholder."""
    value, shape, dtype = given
    if isinstance(value, str):
        return SharedMemoryArray(value, tuple(shape), dtype)
    return np.frombuffer(value, dtype).reshape(shape)
