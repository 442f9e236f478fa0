"""A group of codes of 4, 5, 6 or 8 bits in registers: 32 inputs of sixteen outputs, as bytes of four inputs at a time.

A group has as many words of each output as a code has bits. The low nibbles of word k are step 2k, the high ones step
2k + 1; the fifth bits are a word of planes, bit s those of step s; the upper two bits of six are two words of planes,
of four steps each. Codes of eight bits are words as they are. Knows LLVM only.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from model_worker.cpu.simd.dot_bf16 import INDEX, LANES, WORDS

# Outputs of half a panel, whose words lie side by side.
HALF_LANES = 2 * LANES


def index(value: int) -> Any:
    return ir.Constant(INDEX, value)


def every_lane(value: int) -> Any:
    return ir.Constant(WORDS, [value] * LANES)


class CodeGroup:
    """A group's codes for one vector of outputs. Words are loaded when they are first needed."""

    def __init__(self, builder: Any, bits: int, place: Any) -> None:
        """`place` points to the group's first word of the vector's first output."""
        self._builder = builder
        self._bits = bits
        self._place = place
        self._words: dict[int, Any] = {}

    def _word(self, number: int) -> Any:
        if number not in self._words:
            place = self._builder.gep(self._place, [index(number * HALF_LANES)])
            self._words[number] = self._builder.load(self._builder.bitcast(place, WORDS.as_pointer()), align=4)
        return self._words[number]

    def step(self, step: int) -> Any:
        """Return the codes of four inputs of each output, as bytes."""
        if self._bits == 8:
            return self._word(step)
        nibbles = self._builder.and_(self._shifted(self._word(step // 2), 4 * (step % 2)), every_lane(0x0F0F0F0F))
        if self._bits == 4:
            return nibbles
        if self._bits == 5:
            upper = self._builder.and_(self._shifted(self._word(4), step - 4), every_lane(0x10101010))
        else:
            upper = self._builder.and_(
                self._shifted(self._word(4 + step // 4), 2 * (step % 4) - 4), every_lane(0x30303030)
            )
        return self._builder.or_(nibbles, upper)

    def _shifted(self, words: Any, right: int) -> Any:
        """Shift words to the right, or to the left for a negative number."""
        if right == 0:
            return words
        return (
            self._builder.lshr(words, every_lane(right)) if right > 0 else self._builder.shl(words, every_lane(-right))
        )
