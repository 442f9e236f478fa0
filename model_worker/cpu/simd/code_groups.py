"""A group of codes of 4, 5, 6 or 8 bits in registers: 32 inputs of sixteen outputs, as bytes of four inputs at a time.

A group has as many words of each output as a code has bits. The low nibbles of word k are step 2k, the high ones step
2k + 1; the fifth bits are a word of planes, bit s those of step s; the upper two bits of six are two words of planes,
of four steps each. Codes of eight bits are words as they are. Codes of four bits may be places of a table of bytes.
Knows LLVM only.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from model_worker.cpu.simd.dot_bf16 import FEATURES, INDEX, LANES, WORDS

# Outputs of half a panel, whose words lie side by side.
HALF_LANES = 2 * LANES
# Values of a table.
TABLE_VALUES = 16
# Whether there are instructions that take bytes of a table by their places.
HAS_BYTE_TABLES: bool = FEATURES.get("avx2", False)
_HAS_WIDE_BYTE_TABLES: bool = FEATURES.get("avx512bw", False)
_BYTE = ir.IntType(8)
_TABLE = ir.VectorType(_BYTE, TABLE_VALUES)
_VECTOR_BYTES = 4 * LANES
_BYTES = ir.VectorType(_BYTE, _VECTOR_BYTES)
_WORD = ir.IntType(32)


def index(value: int) -> Any:
    return ir.Constant(INDEX, value)


def every_lane(value: int) -> Any:
    return ir.Constant(WORDS, [value] * LANES)


class ByteTable:
    """Sixteen bytes at an address, in registers. Only where there are instructions for it (HAS_BYTE_TABLES)."""

    def __init__(self, builder: Any, address: Any) -> None:
        self._builder = builder
        table = builder.load(builder.inttoptr(address, _TABLE.as_pointer()), align=4)
        self._size = _VECTOR_BYTES if _HAS_WIDE_BYTE_TABLES else _VECTOR_BYTES // 2
        # An instruction takes places within sixteen bytes each.
        self._table = self._shuffled(table, table, [i % TABLE_VALUES for i in range(self._size)])

    def at(self, places: Any) -> Any:
        """Return the bytes at places [0, 16), which are bytes of words."""
        builder = self._builder
        vector = ir.VectorType(_BYTE, self._size)
        kind = ir.FunctionType(vector, (vector, vector))
        name = "llvm.x86.avx512.pshuf.b.512" if _HAS_WIDE_BYTE_TABLES else "llvm.x86.avx2.pshuf.b"
        take = builder.module.declare_intrinsic(name, (), kind)
        every = builder.bitcast(places, _BYTES)
        if _HAS_WIDE_BYTE_TABLES:
            return builder.bitcast(builder.call(take, (self._table, every)), WORDS)
        halves = [
            builder.call(take, (self._table, self._shuffled(every, every, list(range(first, first + self._size)))))
            for first in (0, self._size)
        ]
        return builder.bitcast(self._shuffled(halves[0], halves[1], list(range(_VECTOR_BYTES))), WORDS)

    def _shuffled(self, first: Any, second: Any, numbers: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(_WORD, len(numbers)), numbers)
        return self._builder.shuffle_vector(first, second, mask)


class CodeGroup:
    """A group's codes for one vector of outputs. Words are loaded when they are first needed."""

    def __init__(self, builder: Any, bits: int, place: Any, table: ByteTable | None = None) -> None:
        """`place` points to the group's first word of the vector's first output."""
        self._builder = builder
        self._bits = bits
        self._place = place
        self._table = table
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
            return nibbles if self._table is None else self._table.at(nibbles)
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
