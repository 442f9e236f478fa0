"""The argmax of a row of sums, found while they are still in a tile: greedy rows need no logits in memory.

Knows float32 by its bits. Floats are compared as whole numbers of the same order, which compilers turn into vectors,
unlike comparisons that must mind NaNs. A NaN counts as the largest of all. Does not know what the sums are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

_MATH = {"reassoc", "contract", "nsz"}
_SIGN = np.int32(31)
_REST = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_LEAST = np.int32(-0x80000000)
_NO_NUMBER = np.int32(0x7FFFFFFF)
# Keys of the two infinities: every finite number lies between them.
_LOWEST = int(_INFINITY ^ _REST) - (1 << 31)
_HIGHEST = int(_INFINITY)


@njit(error_model="numpy", inline="always")
def _key(bits: Any) -> Any:
    """Return a whole number that is larger for a larger float; keys of NaNs lie beyond the infinities' on both
    sides."""
    return np.int32(bits ^ np.int32(np.int32(bits >> _SIGN) & _REST))


bits_of = _key  # the way back is the same


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def key_of_largest(tile: Any, bits: Any, r: int, lanes: int) -> Any:
    """Return the key of the largest of tile[r, :lanes]; `bits` is the tile as int32."""
    total = np.float32(0.0)
    most = _LEAST
    for lane in range(lanes):
        total += tile[r, lane]
    if abs(total) < np.float32(np.inf):
        for lane in range(lanes):
            most = max(most, _key(bits[r, lane]))
    else:  # infinities or NaNs are among them, which is rare: this loop need not be fast
        for lane in range(lanes):
            is_number = np.int32(bits[r, lane] & _REST) <= _INFINITY
            most = max(most, _key(bits[r, lane]) if is_number else _NO_NUMBER)
    return most


@njit(fastmath=_MATH, error_model="numpy", nogil=True, cache=True)
def take_argmax(tile: Any, bits: Any, rows: int, lanes: int, at: int, keys: Any, places: Any, first: int) -> None:
    """Update each row's argmax: the key of its largest sum here and before, and its place; the first among equals.

    tile[r, :lanes] are the sums of row `first + r` for the places `at`, `at + 1`...; `bits` is the tile as int32.
    Indices instead of slices: a slice holds a reference, whose count takes longer than all the rest.
    """
    for r in range(rows):
        most = key_of_largest(tile, bits, r, lanes)
        row = first + r
        # Panels come in any order, and equal ones are what identical weights give.
        if most > keys[row] or (most == keys[row] and at < places[row]):
            keys[row] = most
            for lane in range(lanes):
                if _key(bits[r, lane]) == most:
                    places[row] = at + lane
                    break


@njit(error_model="numpy", nogil=True, cache=True)
def reduce_argmax(keys: Any, places: Any, tokens: Any) -> None:
    """Reduce the argmax of all cores: tokens[row] is the place of the largest sum, the first among equals; -1 if not
    finite.

    Resets `keys` and `places` for the next pass.
    """
    for row in range(len(tokens)):
        best = 0
        for core in range(1, len(keys)):
            key = keys[core, row]
            most = keys[best, row]
            if key > most or (key == most and places[core, row] < places[best, row]):
                best = core
        finite = _LOWEST < keys[best, row] < _HIGHEST
        tokens[row] = places[best, row] if finite else -1
    keys[:] = _LEAST
    places[:] = 0


class ArgmaxBuffers:
    """Buffers for each core's argmax of `rows` rows, and for the tokens that they are reduced to."""

    def __init__(self, cores: int, rows: int) -> None:
        self.keys: NDArray[np.int32] = np.full((cores, rows), _LEAST, np.int32)
        self.places: NDArray[np.int64] = np.zeros((cores, rows), np.int64)
        self.tokens: NDArray[np.int64] = np.empty(rows, np.int64)
