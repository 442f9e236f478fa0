"""The format of bfloat16 panels that may be in bf12: one, so that both are compiled at once.

A product of few rows reads the bf12 copy, and one of many the words. They are different panels, and the same compiled
code, in which a field of the format chooses: two formats would take twice as long to compile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model_worker.cpu.gemm.weight_format import HALVES, WeightFormat
from model_worker.cpu.gemm.word_format import WordFormat, multiply_words, word_panel_at, word_steps
from model_worker.cpu.simd.bf12 import BF12_STEP_BYTES, HAS_BF12, HEADER_BYTES, bf12_panel_bytes
from model_worker.cpu.simd.dot_bf12 import multiply_bf12_half_panel, multiply_bf12_panel
from model_worker.cpu.simd.dot_bf16 import PIECE_ROWS, STEP_BYTES, groups_of


class Bf12Format(NamedTuple):
    """Panels of bfloat16 words, or of their bf12 form. A bf12 panel is its address, and the number of the half."""

    like: NDArray[np.uint16]
    in_bf12: bool

    def of_core(self, core: int) -> Bf12Format:
        return self

    def prepare(self, operand: Any) -> None:
        pass

    def piece_rows(self) -> int:
        return PIECE_ROWS

    def passes(self, rows: int, whole: bool) -> int:
        return groups_of(rows, whole)

    def panel_at(self, operand: Any, panels: int, unit: int) -> tuple[int, int]:
        steps = word_steps(operand, self.like)
        if self.in_bf12:
            return panels + (unit // HALVES) * bf12_panel_bytes(steps), unit % HALVES
        address = word_panel_at(steps, panels, unit)
        return address, address

    def layout(self, operand: Any, panel: tuple[int, int]) -> tuple[int, int, int]:
        steps = word_steps(operand, self.like)
        if self.in_bf12:
            return HEADER_BYTES, BF12_STEP_BYTES, steps
        return 0, STEP_BYTES, steps

    def multiply(
        self, operand: Any, first: int, rows: int, panel: tuple[int, int], whole: bool, prefetching: Any, tile: Any
    ) -> None:
        if not self.in_bf12:
            multiply_words(operand, self.like, first, rows, panel[0], whole, prefetching, tile)
        elif whole:
            multiply_bf12_panel(operand, self.like, first, rows, panel[0], prefetching, tile)
        else:
            multiply_bf12_half_panel(operand, self.like, first, rows, panel[0], panel[1], prefetching, tile)


def with_bf12(plain: WeightFormat) -> WeightFormat:
    """Return the format that takes bf12 panels, too, where the plain one has a bf12 form that this CPU multiplies."""
    if HAS_BF12 and isinstance(plain, WordFormat) and plain.like.dtype == np.uint16:
        return Bf12Format(plain.like, in_bf12=False)
    return plain
