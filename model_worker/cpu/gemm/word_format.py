"""The format of panels whose words are one float32 or two bfloat16: packed_linear.py lays them out.

Does not know the meaning of operands.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from model_worker.cpu.gemm.weight_format import HALF, HALVES, LANE_BYTES
from model_worker.cpu.simd.dot_bf16 import PIECE_ROWS, STEP_BYTES, groups_of, multiply_half_panel, multiply_panel
from model_worker.cpu.simd.elements import INSIDE


class WordFormat(NamedTuple):
    """Panels of words."""

    like: NDArray[Any]  # any array of the element type of the weights: uint16 stands for bfloat16

    def of_core(self, core: int) -> WordFormat:
        return self

    def prepare(self, operand: Any) -> None:
        pass

    def piece_rows(self) -> int:
        return PIECE_ROWS

    def passes(self, rows: int, whole: bool) -> int:
        return groups_of(rows, whole)

    def panel_at(self, operand: Any, panels: int, unit: int) -> tuple[int, int]:
        address = word_panel_at(word_steps(operand, self.like), panels, unit)
        return address, address

    def layout(self, operand: Any, panel: tuple[int, int]) -> tuple[int, int, int]:
        return 0, STEP_BYTES, word_steps(operand, self.like)

    def multiply(
        self, operand: Any, first: int, rows: int, panel: tuple[int, int], whole: bool, prefetching: Any, tile: Any
    ) -> None:
        multiply_words(operand, self.like, first, rows, panel[0], whole, prefetching, tile)


def word_format(element: Any) -> WordFormat:
    """Return the format of words of this element type."""
    return WordFormat(np.empty(1, element))


@njit(nogil=True, cache=True, **INSIDE)
def word_steps(operand: Any, like: Any) -> Any:
    """Return the steps of each panel of weights as wide as the operand."""
    return operand.shape[1] * like.itemsize // LANE_BYTES


@njit(nogil=True, cache=True, **INSIDE)
def word_panel_at(steps: int, panels: int, unit: int) -> int:
    """Return the address of half panel number `unit`."""
    return panels + (unit // HALVES) * (steps * STEP_BYTES) + (unit % HALVES) * HALF * LANE_BYTES


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def multiply_words(
    operand: Any, like: Any, first: int, rows: int, address: int, whole: bool, prefetching: Any, tile: Any
) -> None:
    """Multiply by the panel, or half panel, of words at this address."""
    if whole:
        multiply_panel(operand, like, first, rows, address, prefetching, tile)
    else:
        multiply_half_panel(operand, like, first, rows, address, prefetching, tile)
