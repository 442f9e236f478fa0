"""Finds which of lm_head's panels can hold the largest logit, from a copy of its weights that takes half the bytes.

A greedy token needs no logits, only their argmax, and reading lm_head for it is a fifth of what a step of a small model
reads. So an int8 copy is multiplied first. Each logit differs from its exact sum by at most what Cauchy and Schwarz
allow: |x| times the length of the rounding error of its weights, plus the fixed-point error of x (fixed_point.py), and
the float32 error of either sum.

Panels that could not reach the largest logit within these bounds are left out; the others, two or three as a rule, are
multiplied exactly, by the same kernel as ever. So every bit of the answer is what it would be without the screen.

Knows panels as int8_linear.py and packed_linear.py describe them. Does not know the meaning of operands.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from model_worker.cpu.gemm.int8_linear import int8_panels, quantize
from model_worker.cpu.gemm.products import head_product, pieces_of_rows
from model_worker.cpu.gemm.weight_format import PANEL
from model_worker.cpu.huge_pages import keep_in_huge_pages
from model_worker.cpu.simd.argmax import bits_of, key_of_largest
from model_worker.cpu.simd.elements import widened
from model_worker.cpu.simd.fixed_point import HARDLY_ANYTHING, ROUNDING

if TYPE_CHECKING:
    from model_worker.cpu.gemm.packed_linear import PackedLinear

# Most rows that are screened: with more, arithmetic is the bottleneck, and the screen has more of it.
SCREENED_ROWS = 4
# Bytes of lm_head from which on they do not stay in a cache, so that screening pays.
WORTH_SCREENING = 16 << 20
_UNIT = 2.0**-23  # twice float32's: some instructions cut off instead of rounding
_SLACK = 1.001  # for the arithmetic of the bounds themselves
# Beyond these sums may overflow, or products vanish.
_ALMOST_INFINITE = np.float32(1e30)
_ALMOST_NOTHING = np.float32(1e-30)
_SMALLEST = np.float32(1e10) * HARDLY_ANYTHING
_CHUNK = 128 * PANEL
_MOST_SHARE = 4
_PAUSE = 256


@njit(error_model="numpy", nogil=True, cache=True)
def screen(
    taken: Any, operand: Any, weight_format: Any, panels: int, width: int, peaks: Any, tile: Any, bits: Any
) -> None:
    """Write peaks[row, p]: the largest of operand[row] . int8 panel p as float32's bits; a NaN counts as larger than
    all.

    `taken` are the panels to multiply: the first, and their number. `width` is the outputs of all panels; `bits` is the
    tile as int32.
    """
    rows = len(peaks)
    last = -(-width // PANEL) - 1
    for number in range(taken[0], taken[0] + taken[1]):
        lanes = min(PANEL, width - number * PANEL)
        after = min(number + 1, last)
        for piece in range(pieces_of_rows(rows, weight_format)):
            first, many = head_product(operand, rows, piece, weight_format, panels, number, after, tile)
            for r in range(many):
                peaks[first + r, number] = bits_of(key_of_largest(tile, bits, r, lanes))


@njit(error_model="numpy", nogil=True, cache=True)
def choose(operand: Any, bounds: Any, bits: Any, candidates: Any) -> None:
    """Choose the candidates: chosen[0] is the number of panels that may hold the largest sum of a row; then which,
    ascending.

    `bits` are the peaks'. A NaN cannot be ruled out, nor a sum that may have overflowed, nor those of rows so small
    that their fixed-point digits are all zero.
    """
    rows = bits.shape[0]
    count = bits.shape[1]
    peaks = bits.view(np.float32)
    lengths = np.empty(rows, np.float32)
    least = np.full(rows, np.float32(-np.inf))
    for row in range(rows):
        square = np.float64(0.0)
        for c in range(operand.shape[1]):
            square += np.float64(widened(operand[row, c])) ** 2
        lengths[row] = np.sqrt(square) + _ALMOST_NOTHING
        if lengths[row] < _SMALLEST:
            lengths[row] = np.float32(np.inf)
        for panel in range(count):
            low = peaks[row, panel] - (lengths[row] * bounds[panel] + _ALMOST_NOTHING)
            if low > least[row]:
                least[row] = low
    found = 0
    for panel in range(count):
        possible = False
        for row in range(rows):
            error = lengths[row] * bounds[panel] + _ALMOST_NOTHING
            ruled_out = error < _ALMOST_INFINITE and peaks[row, panel] + error < least[row]
            possible = possible or not ruled_out
        if possible:
            candidates[1 + found] = panel
            found += 1
    candidates[0] = found


class Screen:
    """The int8 copy of a packed linear module without bias, and buffers for the results of a pass."""

    def __init__(self, head: PackedLinear, width: int) -> None:
        """Make the copy. The module's first `width` outputs count."""
        weight = head.weight
        panels = []
        bounds = []
        padding = head.input_width - weight.shape[1]
        for first in range(0, width, _CHUNK):
            part = functional.pad(weight[first : min(first + _CHUNK, width)], (0, padding))
            panels.append(int8_panels(quantized := quantize(part)))
            bounds.append(_bounds(part.float(), quantized.weight))
        self.panels: NDArray[np.uint8] = torch.cat(panels).numpy()
        keep_in_huge_pages([self.panels], written=True)
        lengths = torch.cat(bounds)
        lengths = functional.pad(lengths, (0, -len(lengths) % PANEL)).reshape(-1, PANEL)
        self.bounds: NDArray[np.float32] = lengths.amax(1).numpy()
        self.peaks = np.empty((SCREENED_ROWS, len(self.bounds)), np.int32)
        self.candidates = np.zeros(1 + len(self.bounds), np.int64)
        self._paused = 0

    def pays(self) -> bool:
        """Whether to use the screen in the next passes. They count as one."""
        self._paused = max(0, self._paused - 1)
        return self._paused == 0

    def look_back(self) -> None:
        """Record the result of a screened pass: after too many candidates the screen is not used for a while."""
        if int(self.candidates[0]) * _MOST_SHARE > len(self.bounds):
            self._paused = _PAUSE


def _vanishing(elements: int) -> float:
    """Return the length of the elements of a vector that instructions may flush to zero in one sum and not in the
    other."""
    return 2 * float(np.finfo(np.float32).tiny) * math.sqrt(elements)


def _bounds(exact: Tensor, quantized: Tensor) -> Tensor:
    """Return the most by which the product of each row with a vector of length 1 may differ in float32: [outputs]."""
    steps = exact.shape[1] + 8
    lost = (exact - quantized).norm(dim=1) + _vanishing(exact.shape[1])
    most = exact.norm(dim=1) + quantized.norm(dim=1)
    in_fixed_point = quantized.norm(dim=1) * (ROUNDING * math.sqrt(exact.shape[1]))
    bounds: Tensor = (lost + in_fixed_point + most * (steps * _UNIT)) * _SLACK
    return bounds
