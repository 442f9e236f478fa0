"""bfloat16 weights in twelve bits instead of sixteen, exactly: what few rows read of a model that no cache holds.

A weight is a sign, seven bits of mantissa, and an exponent of eight bits that says little: nearly all weights of a
matrix lie within a few powers of two (DFloat11, arXiv:2504.11651, measures 2.6 bits). So a panel has a window of
fifteen exponents, and each weight a code of four bits: its place in the window, or 0 for zero itself. A step of a panel
with a weight outside the window is an exception, which is kept as it was, beside the panel. So nothing is rounded, and
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

HAS_COMPACT: bool = HAS_BF16_DOT and FEATURES.get("avx512vbmi", False)
"""Whether there are instructions that multiply bfloat16, and that look bytes up in registers."""
WINDOW = 15
"""Exponents that a code can name, beside zero's."""
GROUP_BYTES = 64
"""Of a step: signs and mantissas of half a panel's outputs; then those of the other half; then the codes of both."""
COMPACT_STEP_BYTES = 3 * GROUP_BYTES
HEADER_BYTES = 64
"""What a panel begins with: sixteen upper and sixteen lower bytes of a bfloat16 by its code, then the addresses of its
exceptions' numbers and of their words."""
UPPER_BYTES, LOWER_BYTES, NUMBERS_ADDRESS, WORDS_ADDRESS = 0, 16, 32, 40
"""Where in the header."""
_PANEL, _LANES, _LANE_ELEMENTS = 64, 16, 8
_EXPONENT_BITS, _MANTISSA_BITS = 8, 7
_EXPONENTS = (1 << _EXPONENT_BITS) - 1


class CompactPanels(NamedTuple):
    """The panels of one matrix, and their exceptions, which they find by address."""

    panels: NDArray[np.uint8]  # [panel, HEADER_BYTES + steps * COMPACT_STEP_BYTES]
    numbers: NDArray[np.int32]  # of a panel's exceptional steps, rising, then how many steps it has; panel by panel
    words: NDArray[np.uint32]  # [exceptions, PANEL]

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes + self.numbers.nbytes + self.words.nbytes


@njit(nogil=True, cache=True)
def compact_panel_bytes(steps: int) -> int:
    """What a panel of so many steps takes."""
    return HEADER_BYTES + steps * COMPACT_STEP_BYTES


def compact_panels(matrices: Sequence[NDArray[np.uint32]], most_bytes: float = math.inf) -> list[CompactPanels]:
    """Of words [panel, step, PANEL] each, of two bfloat16 of neighbouring inputs; side by side, in large pages.

    None at all, and no memory taken, where they would be more than `most_bytes`: every exception is one step more to
    read, and weights of which many lie apart have many.
    """
    windows = [_windows_of(words) for words in matrices]
    if sum(_bytes_of(*of) for of in zip(matrices, windows, strict=True)) > most_bytes:
        return []
    sizes = [len(words) * compact_panel_bytes(words.shape[1]) for words in matrices]
    # A line of memory at a time is read, so none should be cut in two.
    room = np.empty(sum(sizes) + GROUP_BYTES, np.uint8)
    keep_in_huge_pages([room], written=False)
    first = -room.ctypes.data % GROUP_BYTES
    begins = first + np.cumsum(sizes) - sizes
    return [
        _compacted(words, chosen, room[begin : begin + size].reshape(len(words), -1))
        for words, chosen, begin, size in zip(matrices, windows, begins, sizes, strict=True)
    ]


class _Windows(NamedTuple):
    """Of a matrix' panels: the exponents that the code 1 names, and how many steps are exceptions then."""

    firsts: NDArray[np.int64]
    found: NDArray[np.int64]


def _windows_of(words: NDArray[np.uint32]) -> _Windows:
    windows = _Windows(np.empty(len(words), np.int64), np.empty(len(words), np.int64))
    _choose_windows(words, *windows)
    return windows


def _bytes_of(words: NDArray[np.uint32], windows: _Windows) -> int:
    """What a matrix will take, exceptions and their numbers counted."""
    exceptions, count = int(windows.found.sum()), len(words)
    return count * compact_panel_bytes(words.shape[1]) + 4 * (exceptions + count) + 4 * _PANEL * exceptions


def _compacted(words: NDArray[np.uint32], windows: _Windows, panels: NDArray[np.uint8]) -> CompactPanels:
    count, (firsts, found) = len(words), windows
    numbers, kept = np.empty(int(found.sum()) + count, np.int32), np.empty((int(found.sum()), _PANEL), np.uint32)
    _write(words, firsts, panels, numbers, kept)
    before = np.cumsum(found) - found
    addresses = panels[:, NUMBERS_ADDRESS : NUMBERS_ADDRESS + 16].view(np.int64)
    addresses[:, 0] = numbers.ctypes.data + numbers.itemsize * (before + np.arange(count))
    addresses[:, 1] = kept.ctypes.data + kept.itemsize * _PANEL * before
    return CompactPanels(panels, numbers, kept)


@njit(nogil=True, cache=True, **INSIDE)
def _exponent(word: Any, half: int) -> Any:
    """Of one of the two bfloat16 of a word."""
    return (np.int64(word) >> (16 * half + _MANTISSA_BITS)) & _EXPONENTS


@njit(nogil=True, cache=True)
def _choose_windows(words: Any, firsts: Any, found: Any) -> None:
    """firsts[panel]: the exponent that the code 1 names; found[panel]: how many steps are exceptions then."""
    steps = words.shape[1]
    least, most = np.empty(steps, np.int64), np.empty(steps, np.int64)
    for panel in range(words.shape[0]):
        highest = 0
        for step in range(steps):
            low, high = _EXPONENTS, 0
            for lane in range(_PANEL):
                for half in range(2):
                    exponent = _exponent(words[panel, step, lane], half)
                    high = max(high, exponent)
                    low = min(low, exponent if exponent > 0 else _EXPONENTS)
            least[step], most[step] = low, high
            highest = max(highest, high)
        found[panel] = steps + 1
        # A few large weights may be worth leaving out, for many small ones.
        for first in range(highest - WINDOW + 1, highest - 2 * WINDOW, -1):
            first = max(first, 1)
            exceptions = 0
            for step in range(steps):
                exceptions += int(most[step] >= first + WINDOW or (most[step] > 0 and least[step] < first))
            if exceptions < found[panel]:
                firsts[panel], found[panel] = first, exceptions


@njit(nogil=True, cache=True)
def _write(words: Any, firsts: Any, panels: Any, numbers: Any, kept: Any) -> None:
    """Everything but addresses."""
    steps, codes, exceptions, number = words.shape[1], np.empty(2 * _PANEL, np.uint8), 0, 0
    for panel in range(words.shape[0]):
        first, to = firsts[panel], panels[panel]
        for code in range(WINDOW + 1):
            exponent = first + code - 1 if code else 0
            to[UPPER_BYTES + code], to[LOWER_BYTES + code] = exponent >> 1, (exponent & 1) << _MANTISSA_BITS
        for step in range(steps):
            at, outside = HEADER_BYTES + step * COMPACT_STEP_BYTES, False
            for i in range(2 * _PANEL):
                # Bytes lie so that interleaving lower and upper ones, lane by lane, brings them into their order.
                group, place = i // GROUP_BYTES, i % GROUP_BYTES
                lane, within = place // _LANES, place % _LANES
                element = lane * _LANE_ELEMENTS + within % _LANE_ELEMENTS
                vector = 2 * group + within // _LANE_ELEMENTS
                word, half = words[panel, step, vector * _LANES + element // 2], element % 2
                value, exponent = np.int64(word) >> (16 * half), _exponent(word, half)
                to[at + i] = ((value >> _EXPONENT_BITS) & 128) | (value & 127)
                code = exponent - first + 1 if exponent else 0
                outside = outside or code < 0 or code > WINDOW or (exponent > 0 and code == 0)
                codes[i] = code & WINDOW
            for place in range(GROUP_BYTES):
                to[at + 2 * GROUP_BYTES + place] = codes[place] | codes[GROUP_BYTES + place] << 4
            if outside:
                numbers[number], number = step, number + 1
                kept[exceptions] = words[panel, step]
                exceptions += 1
        numbers[number], number = steps, number + 1


def warm_up() -> None:
    """Compiles what compacting takes."""
    if HAS_COMPACT:
        compact_panels([np.zeros((1, 1, _PANEL), np.uint32)])
