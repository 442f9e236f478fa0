"""bf12: bfloat16 weights in twelve bits instead of sixteen, without loss, for few rows and a model that no cache holds.

A weight is a sign, seven bits of mantissa, and an exponent of eight bits with little information: nearly all weights of
a matrix lie within a few powers of two (DFloat11, arXiv:2504.11651, measures 2.6 bits). So a panel has a window of
fifteen exponents, and each weight a code of four bits: its place in the window, or 0 for zero itself. A step of a panel
with a weight outside the window is an exception, which is stored unchanged beside the panel. So nothing is rounded, and
sums come in the same order (dot_bf12.py): every bit of a product is what it would be.

Knows panels as packed_linear.py describes them. Does not know how they are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from model_worker.cpu.huge_pages import keep_in_huge_pages
from model_worker.cpu.simd.dot_bf16 import FEATURES, HAS_BF16_DOT
from model_worker.cpu.simd.elements import INSIDE

# Whether there are instructions that multiply bfloat16, and that look bytes up in registers.
HAS_BF12: bool = HAS_BF16_DOT and FEATURES.get("avx512vbmi", False)
# Exponents that a code can name, beside zero's.
WINDOW = 15
# Bytes of a group. A step has three: signs and mantissas of half a panel's outputs; those of the other half; the codes.
GROUP_BYTES = 64
BF12_STEP_BYTES = 3 * GROUP_BYTES
# Bytes of a panel's header: sixteen upper and sixteen lower bytes of a bfloat16 by its code, then the addresses of the
# numbers of its exceptions and of their words.
HEADER_BYTES = 64
# Offsets in the header.
UPPER_BYTES = 0
LOWER_BYTES = 16
NUMBERS_ADDRESS = 32
WORDS_ADDRESS = 40
_PANEL = 64
_LANES = 16
_LANE_ELEMENTS = 8
_EXPONENT_BITS = 8
_MANTISSA_BITS = 7
_EXPONENTS = (1 << _EXPONENT_BITS) - 1


class Bf12Panels(NamedTuple):
    """The bf12 panels of one matrix, and their exceptions, which they find by address."""

    panels: NDArray[np.uint8]  # [panel, HEADER_BYTES + steps * BF12_STEP_BYTES]
    numbers: NDArray[np.int32]  # of a panel's exceptional steps, rising, then how many steps it has; panel by panel
    words: NDArray[np.uint32]  # [exceptions, PANEL]

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes + self.numbers.nbytes + self.words.nbytes


@njit(nogil=True, cache=True)
def bf12_panel_bytes(steps: int) -> int:
    """Return the bytes of a panel with `steps` steps."""
    return HEADER_BYTES + steps * BF12_STEP_BYTES


def bf12_panels(matrices: Sequence[NDArray[np.uint32]], most_bytes: float = math.inf) -> list[Bf12Panels]:
    """Compress matrices of words [panel, step, PANEL], each of two bfloat16 of neighbouring inputs, into large pages.

    Returns none, and takes no memory, where they would be more than `most_bytes`: every exception is one step more to
    read, and weights of which many lie apart have many.
    """
    windows = [_windows_of(words) for words in matrices]
    if sum(_bytes_of(*of) for of in zip(matrices, windows, strict=True)) > most_bytes:
        return []
    sizes = [len(words) * bf12_panel_bytes(words.shape[1]) for words in matrices]
    # A line of memory at a time is read, so none should be cut in two.
    room = np.empty(sum(sizes) + GROUP_BYTES, np.uint8)
    keep_in_huge_pages([room], written=False)
    first = -room.ctypes.data % GROUP_BYTES
    begins = first + np.cumsum(sizes) - sizes
    return [
        _in_bf12(words, candidates, room[begin : begin + size].reshape(len(words), -1))
        for words, candidates, begin, size in zip(matrices, windows, begins, sizes, strict=True)
    ]


class _Windows(NamedTuple):
    """The windows of a matrix' panels: the exponents that the code 1 names, and the number of steps that are
    exceptions."""

    firsts: NDArray[np.int64]
    found: NDArray[np.int64]


def _windows_of(words: NDArray[np.uint32]) -> _Windows:
    windows = _Windows(np.empty(len(words), np.int64), np.empty(len(words), np.int64))
    _choose_windows(words, *windows)
    return windows


def _bytes_of(words: NDArray[np.uint32], windows: _Windows) -> int:
    """Return the bytes of a matrix in bf12, exceptions and their numbers counted."""
    exceptions = int(windows.found.sum())
    count = len(words)
    return count * bf12_panel_bytes(words.shape[1]) + 4 * (exceptions + count) + 4 * _PANEL * exceptions


def _in_bf12(words: NDArray[np.uint32], windows: _Windows, panels: NDArray[np.uint8]) -> Bf12Panels:
    count = len(words)
    firsts, found = windows
    numbers = np.empty(int(found.sum()) + count, np.int32)
    kept = np.empty((int(found.sum()), _PANEL), np.uint32)
    _write(words, firsts, panels, numbers, kept)
    before = np.cumsum(found) - found
    addresses = panels[:, NUMBERS_ADDRESS : NUMBERS_ADDRESS + 16].view(np.int64)
    addresses[:, 0] = numbers.ctypes.data + numbers.itemsize * (before + np.arange(count))
    addresses[:, 1] = kept.ctypes.data + kept.itemsize * _PANEL * before
    return Bf12Panels(panels, numbers, kept)


@njit(nogil=True, cache=True, **INSIDE)
def _exponent(word: Any, half: int) -> Any:
    """Return the exponent of one of the two bfloat16 of a word."""
    return (np.int64(word) >> (16 * half + _MANTISSA_BITS)) & _EXPONENTS


@njit(nogil=True, cache=True)
def _choose_windows(words: Any, firsts: Any, found: Any) -> None:
    """Choose windows: firsts[panel] is the exponent that the code 1 names; found[panel] the number of exceptions."""
    steps = words.shape[1]
    least = np.empty(steps, np.int64)
    most = np.empty(steps, np.int64)
    for panel in range(words.shape[0]):
        highest = 0
        for step in range(steps):
            low = _EXPONENTS
            high = 0
            for lane in range(_PANEL):
                for half in range(2):
                    exponent = _exponent(words[panel, step, lane], half)
                    high = max(high, exponent)
                    low = min(low, exponent if exponent > 0 else _EXPONENTS)
            least[step] = low
            most[step] = high
            highest = max(highest, high)
        found[panel] = steps + 1
        # A few large weights may be worth leaving out, for many small ones.
        for first in range(highest - WINDOW + 1, highest - 2 * WINDOW, -1):
            first = max(first, 1)
            exceptions = 0
            for step in range(steps):
                exceptions += int(most[step] >= first + WINDOW or (most[step] > 0 and least[step] < first))
            if exceptions < found[panel]:
                firsts[panel] = first
                found[panel] = exceptions


@njit(nogil=True, cache=True)
def _write(words: Any, firsts: Any, panels: Any, numbers: Any, kept: Any) -> None:
    """Write the panels and exceptions, all but addresses."""
    steps = words.shape[1]
    codes = np.empty(2 * _PANEL, np.uint8)
    exceptions = 0
    number = 0
    for panel in range(words.shape[0]):
        first = firsts[panel]
        to = panels[panel]
        for code in range(WINDOW + 1):
            exponent = first + code - 1 if code else 0
            to[UPPER_BYTES + code] = exponent >> 1
            to[LOWER_BYTES + code] = (exponent & 1) << _MANTISSA_BITS
        for step in range(steps):
            at = HEADER_BYTES + step * BF12_STEP_BYTES
            outside = False
            for i in range(2 * _PANEL):
                # Bytes lie so that interleaving lower and upper ones, lane by lane, brings them into their order.
                group = i // GROUP_BYTES
                place = i % GROUP_BYTES
                lane = place // _LANES
                within = place % _LANES
                element = lane * _LANE_ELEMENTS + within % _LANE_ELEMENTS
                vector = 2 * group + within // _LANE_ELEMENTS
                word = words[panel, step, vector * _LANES + element // 2]
                half = element % 2
                value = np.int64(word) >> (16 * half)
                exponent = _exponent(word, half)
                to[at + i] = ((value >> _EXPONENT_BITS) & 128) | (value & 127)
                code = exponent - first + 1 if exponent else 0
                outside = outside or code < 0 or code > WINDOW or (exponent > 0 and code == 0)
                codes[i] = code & WINDOW
            for place in range(GROUP_BYTES):
                to[at + 2 * GROUP_BYTES + place] = codes[place] | codes[GROUP_BYTES + place] << 4
            if outside:
                numbers[number] = step
                number = number + 1
                kept[exceptions] = words[panel, step]
                exceptions += 1
        numbers[number] = steps
        number = number + 1


def warm_up() -> None:
    """Compile the compression."""
    if HAS_BF12:
        bf12_panels([np.zeros((1, 1, _PANEL), np.uint32)])
