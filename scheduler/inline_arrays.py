"""Images of sequences on other machines, which cannot map the shared memory of this one: their arrays travel inline.

An array is mapped when its sequence is placed. From then on it stays readable, although its owner may remove it.
"""

from __future__ import annotations

from collections.abc import Iterable

from interfaces import SharedMemoryArray
from scheduler.sequence import Sequence
from shared.sockets import MAX_MESSAGE_BYTES

# Bytes of arrays in one step. A request with more is not for workers of other machines.
MOST_INLINE_BYTES = MAX_MESSAGE_BYTES // 4


def array_bytes(sequences: Iterable[Sequence]) -> int:
    """Bytes of the arrays of all images of some sequences."""
    return sum(
        array.nbytes
        for sequence in sequences
        for image in sequence.images
        for array in (image.pixel_values, *image.extras.values())
    )


def map_arrays(sequence: Sequence) -> str:
    """Map the arrays of a sequence that are in shared memory. Returns why one cannot be read, or nothing."""
    try:
        for image in sequence.images:
            if isinstance(image.pixel_values, SharedMemoryArray):
                image.pixel_values = image.pixel_values.open()
            image.extras = {
                name: array.open() if isinstance(array, SharedMemoryArray) else array
                for name, array in image.extras.items()
            }
    except ValueError as error:
        return f"an image of this request is not there any more: {error}"
    return ""
