"""Brings samples to another rate, piece by piece, by a windowed-sinc filter.

A stream of pieces gives what one piece of all samples gives. Knows numbers; knows no formats.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

# Zero crossings of the filter on each side of a sample, at the lower of the two rates.
_CROSSINGS = 16
# Part of the band that passes; the rest is the filter's slope.
_PASSED = 0.95
# Samples of output that are made at a time: the filter's windows for them take 200 times as many bytes.
_AT_A_TIME = 1 << 14


class Resampler:
    """Turns samples at the rate `source` into samples at the rate `target`, both in Hz."""

    def __init__(self, source: int, target: int) -> None:
        common = math.gcd(source, target)
        # Output n stands at input n * step / steps.
        self._steps = target // common
        self._step = source // common
        self._half = math.ceil(_CROSSINGS * max(1.0, source / target))
        self._filters = _filters(self._steps, self._half, min(1.0, target / source))
        # The input from the first sample on that an output still needs. Silence comes before it.
        self._kept = np.zeros(self._half - 1, np.float32)
        # The place of that sample, the number of all inputs, and the next output.
        self._first = 1 - self._half
        self._taken = 0
        self._next = 0

    def push(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Take more input, and return the output that needs no later one."""
        if self._steps == self._step:
            return samples
        self._taken += len(samples)
        self._kept = np.concatenate([self._kept, samples])
        # Output n needs the inputs up to floor(n * step / steps) + half.
        last = self._taken - 1 - self._half
        return self._made(0 if last < 0 else (last * self._steps + self._steps - 1) // self._step + 1)

    def end(self) -> NDArray[np.float32]:
        """Return the rest: silence follows the input."""
        if self._steps == self._step:
            return np.zeros(0, np.float32)
        self._kept = np.concatenate([self._kept, np.zeros(self._half + 1, np.float32)])
        return self._made(math.ceil(self._taken * self._steps / self._step))

    def _made(self, end: int) -> NDArray[np.float32]:
        """Return the outputs before `end`, and forget the input that no later one needs."""
        pieces = [self._block(at, min(at + _AT_A_TIME, end)) for at in range(self._next, end, _AT_A_TIME)]
        if end > self._next:
            self._next = end
            needed = self._next * self._step // self._steps - self._half + 1
            self._kept = self._kept[needed - self._first :]
            self._first = needed
        return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)

    def _block(self, begin: int, end: int) -> NDArray[np.float32]:
        places = np.arange(begin, end, dtype=np.int64) * self._step
        whole = places // self._steps
        windows = np.lib.stride_tricks.sliding_window_view(self._kept, 2 * self._half)
        found = windows[whole - self._half + 1 - self._first] * self._filters[places % self._steps]
        block: NDArray[np.float32] = found.sum(axis=1, dtype=np.float32)
        return block


def _filters(steps: int, half: int, band: float) -> NDArray[np.float32]:
    """Return the filter of each place between two inputs: f32[steps, 2 * half], for the inputs from 1 - half on."""
    between = np.arange(steps)[:, None] / steps
    distance = np.arange(1 - half, half + 1)[None, :] - between
    passed = band * _PASSED
    window = 0.5 + 0.5 * np.cos(np.pi * np.clip(distance / half, -1.0, 1.0))
    found = passed * np.sinc(passed * distance) * window
    # A constant stays what it is, at every place.
    exact: NDArray[np.float32] = (found / found.sum(axis=1, keepdims=True)).astype(np.float32)
    return exact
