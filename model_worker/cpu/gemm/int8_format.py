"""The format of int8 panels, which begin with the scales of their outputs: int8_linear.py lays them out.

An operand is multiplied as fixed-point digits (fixed_point.py), for which each core has room of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model_worker.cpu.gemm.weight_format import HALF, HALVES, LANE_BYTES, PANEL
from model_worker.cpu.simd.dot_bf16 import STEP_BYTES, groups_of
from model_worker.cpu.simd.dot_int8 import int8_rows, multiply_int8_half_panel, multiply_int8_panel
from model_worker.cpu.simd.fixed_point import Digits, digits_of, room_for, split, width_of

# Bytes of scales at the beginning of an int8 panel: a float32 for each output.
SCALE_BYTES = PANEL * LANE_BYTES


class Int8Format(NamedTuple):
    """Panels of int8 weights. A panel is the address of its weights, and that of its scales."""

    like: NDArray[Any]  # any array of the model's element type: uint16 stands for bfloat16
    digits: Digits  # room for the operand: with the core first, or a core's own

    def of_core(self, core: int) -> Int8Format:
        digits = self.digits
        return Int8Format(self.like, Digits(digits.values[core], digits.starts[core], digits.factors[core]))

    def prepare(self, operand: Any) -> None:
        split(operand, self.like, self.digits)

    def piece_rows(self) -> int:
        return int8_rows(self.like)

    def passes(self, rows: int, whole: bool) -> int:
        return groups_of(rows * digits_of(self.like), whole)

    def panel_at(self, operand: Any, panels: int, unit: int) -> tuple[int, int]:
        size = SCALE_BYTES + width_of(operand.shape[1]) // LANE_BYTES * STEP_BYTES
        scales = panels + (unit // HALVES) * size + (unit % HALVES) * HALF * LANE_BYTES
        return scales + SCALE_BYTES, scales

    def layout(self, operand: Any, panel: tuple[int, int]) -> tuple[int, int, int]:
        return 0, STEP_BYTES, width_of(operand.shape[1]) // LANE_BYTES

    def multiply(
        self, operand: Any, first: int, rows: int, panel: tuple[int, int], whole: bool, prefetching: Any, tile: Any
    ) -> None:
        address, scales = panel
        inputs = operand.shape[1]
        if whole:
            multiply_int8_panel(self.like, self.digits, inputs, first, rows, address, scales, prefetching, tile)
        else:
            multiply_int8_half_panel(self.like, self.digits, inputs, first, rows, address, scales, prefetching, tile)


def int8_format(element: Any, cores: int, rows: int, elements: int) -> Int8Format:
    """Return the format of int8 panels in a model of this element type.

    Operands have at most `rows` rows and `elements` elements, counted as `width_of` pads them.
    """
    like = np.empty(1, element)
    return Int8Format(like, room_for(cores, rows, elements, like))
