"""Finds which of lm_head's panels can hold the largest logit, from a copy of its weights that takes half the bytes.

A greedy token needs no logits, only which is largest, and reading lm_head for it is a fifth of what a step of a small
model reads. So an int8 copy is multiplied first. Each logit differs from its exact sum by at most what Cauchy and
Schwarz allow: |x| times the length of what rounding took from its weights, plus what x itself loses in fixed point
(fixed_point.py), and what float32 may round in either sum.
Panels that could not reach the largest logit within these bounds are left out; the others, two or three as a rule, are
multiplied exactly, by the same kernel as ever. So every bit of the answer is what it would be without the screen.

Knows panels as int8_linear.py and packed_linear.py describe them. Does not know what is multiplied.
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

from model_worker.cpu.gemm.int8_linear import int8_panels, rounded
from model_worker.cpu.gemm.products import PANEL, head_product, pieces_of_rows
from model_worker.cpu.huge_pages import keep_in_huge_pages
from model_worker.cpu.simd.argmax import bits_of, largest_key
from model_worker.cpu.simd.elements import widened
from model_worker.cpu.simd.fixed_point import HARDLY_ANYTHING, ROUNDING

if TYPE_CHECKING:
    from model_worker.cpu.gemm.packed_linear import PackedLinear

SCREENED_ROWS = 4
"""More rows wait for arithmetic, of which the screen has more and not less."""
WORTH_SCREENING = 16 << 20
"""Bytes of weights from which on they do not stay in a cache."""
_UNIT = 2.0**-23  # twice float32's: some instructions cut off instead of rounding
_SLACK = 1.001  # for the arithmetic of the bounds themselves
# Beyond these sums may overflow, or products vanish.
_ALMOST_INFINITE, _ALMOST_NOTHING = np.float32(1e30), np.float32(1e-30)
_SMALLEST = np.float32(1e10) * HARDLY_ANYTHING
_CHUNK = 128 * PANEL
_MOST_SHARE, _PAUSE = 4, 256


@njit(error_model="numpy", nogil=True, cache=True)
def screen(taken: Any, operand: Any, kind: Any, panels: int, width: int, peaks: Any, tile: Any, bits: Any) -> None:
    """peaks[row, p]: the largest of operand[row] . int8 panel p as float32's bits; a NaN counts as larger than all.

    Of the panels that are `taken`: the first, and how many. `kind` has the operand's digits; `width` is the outputs of
    all panels; `bits` is the tile as int32.
    """
    rows, last = len(peaks), -(-width // PANEL) - 1
    for number in range(taken[0], taken[0] + taken[1]):
        lanes, after = min(PANEL, width - number * PANEL), min(number + 1, last)
        for piece in range(pieces_of_rows(rows, kind)):
            first, many = head_product(operand, rows, piece, kind, panels, number, after, tile)
            for r in range(many):
                peaks[first + r, number] = bits_of(largest_key(tile, bits, r, lanes))


@njit(error_model="numpy", nogil=True, cache=True)
def choose(operand: Any, bounds: Any, bits: Any, chosen: Any) -> None:
    """chosen[0]: how many panels may hold the largest sum of a row; then which, in rising order.

    `bits` are the peaks'. A sum that is no number cannot be ruled out, nor one that may have overflowed, nor those of
    rows so small that digits hold nothing of them.
    """
    rows, count, peaks = bits.shape[0], bits.shape[1], bits.view(np.float32)
    lengths, least = np.empty(rows, np.float32), np.full(rows, np.float32(-np.inf))
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
            chosen[1 + found] = panel
            found += 1
    chosen[0] = found


class Screen:
    """The int8 copy of a packed linear module without bias, and room for what a pass finds."""

    def __init__(self, head: PackedLinear, width: int) -> None:
        """Of the module's outputs the first `width` count."""
        weight, panels, bounds = head.weight, [], []
        padding = head.input_width - weight.shape[1]
        for first in range(0, width, _CHUNK):
            part = functional.pad(weight[first : min(first + _CHUNK, width)], (0, padding))
            panels.append(int8_panels(said := rounded(part)))
            bounds.append(_bounds(part.float(), said.weight))
        self.panels: NDArray[np.uint8] = torch.cat(panels).numpy()
        keep_in_huge_pages([self.panels], written=True)
        lengths = torch.cat(bounds)
        lengths = functional.pad(lengths, (0, -len(lengths) % PANEL)).reshape(-1, PANEL)
        self.bounds: NDArray[np.float32] = lengths.amax(1).numpy()
        self.peaks = np.empty((SCREENED_ROWS, len(self.bounds)), np.int32)
        self.chosen = np.zeros(1 + len(self.bounds), np.int64)
        self._paused = 0

    def pays(self) -> bool:
        """Whether to use it in the next passes. They count as one."""
        self._paused = max(0, self._paused - 1)
        return self._paused == 0

    def look_back(self) -> None:
        """After a pass that used it: where many panels had to be multiplied after all, it is not used for a while."""
        if int(self.chosen[0]) * _MOST_SHARE > len(self.bounds):
            self._paused = _PAUSE


def _vanishing(elements: int) -> float:
    """The length of what instructions take for zero in a vector, which they may in one sum and not in the other."""
    return 2 * float(np.finfo(np.float32).tiny) * math.sqrt(elements)


def _bounds(exact: Tensor, said: Tensor) -> Tensor:
    """By how much a product of each row with a vector of length 1 may differ, as float32 computes it: [outputs]."""
    steps = exact.shape[1] + 8
    lost, most = (exact - said).norm(dim=1) + _vanishing(exact.shape[1]), exact.norm(dim=1) + said.norm(dim=1)
    in_fixed_point = said.norm(dim=1) * (ROUNDING * math.sqrt(exact.shape[1]))
    bounds: Tensor = (lost + in_fixed_point + most * (steps * _UNIT)) * _SLACK
    return bounds
