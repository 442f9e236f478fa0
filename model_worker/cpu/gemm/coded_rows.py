"""One output's weights out of panels of codes, dequantised: the row of an embedding whose table lies in them.

Knows panels as coded_format.py describes them, and groups as code_groups.py does. The numbers are those of
`Codes.weight`, bit for bit. It reads a line of memory for each word, as rows are looked up: a token at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from model_worker.cpu.gemm import coded_format as fields
from model_worker.cpu.gemm.coded_format import FIELDS, HEADER_BYTES, NOT_THERE, WORD_BITS
from model_worker.cpu.gemm.weight_format import HALF, HALVES, LANE_BYTES, PANEL
from model_worker.cpu.simd.code_groups import TABLE_VALUES
from model_worker.cpu.simd.dot_codes import GROUP_INPUTS, SHORT_BITS, SUM_INPUTS
from model_worker.cpu.simd.dot_floats import FP8_BITS
from model_worker.cpu.simd.elements import INSIDE, carray, number_of, pointer, widened
from model_worker.cpu.simd.fixed_point import PLACES, WORD_BYTES

# The byte of a word that has each of the inputs of a step.
_BYTE_OF_INPUT = np.argsort(np.array(PLACES))
# Words of a group before those of fifth and sixth bits, and steps of which a word has the upper two bits of six.
_NIBBLE_WORDS = 4
_STEPS_OF_PAIRS = 4
# Places of the bits of narrow floats in a float32, and the factors by which such a float32 is too small: the offsets of
# the exponents differ.
_HALF_SHIFT, _HALF_FACTOR = 13, np.float32(2.0**112)
_FP8_SHIFT, _FP8_FACTOR = 20, np.float32(2.0**120)
_HALF_INFINITE = 0x7C00
_INFINITE = 0x7F800000


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def fill_row(panels: int, output: int, to: Any) -> None:
    """Write the weights of an output, float32 [inputs], from panels that begin at this address."""
    header = carray(pointer(panels), FIELDS, np.int32)
    half_bytes = int(header[fields.HALF_BYTES])
    place = panels + output // PANEL * (HEADER_BYTES + HALVES * half_bytes) + HEADER_BYTES
    if header[fields.BITS] == WORD_BITS:
        words = carray(pointer(place), (len(to) // 2 * PANEL, 2), np.uint16)
        for c in range(len(to)):
            to[c] = widened(words[c // 2 * PANEL + output % PANEL, c % 2])
        return
    _fill_coded(panels, place + output % PANEL // HALF * half_bytes, output % HALF, to)


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _fill_coded(panels: int, half: int, lane: int, to: Any) -> None:
    """Write the weights of a lane of the half panel at this address."""
    header = carray(pointer(panels), FIELDS, np.int32)
    table = carray(pointer(panels + fields.TABLE * LANE_BYTES), TABLE_VALUES, np.float32)
    memory = carray(pointer(half), header[fields.HALF_BYTES], np.uint8)
    bits = int(header[fields.BITS])
    unit_inputs = SUM_INPUTS if bits == SHORT_BITS else GROUP_INPUTS
    units = len(to) // unit_inputs
    count = int(header[fields.SCALES_COUNT])
    for unit in range(units):
        scale = _number(half, lane, unit, units, 0, header[fields.SCALES_WIDE], count, int(header[fields.STEPS_PLACE]))
        zero = np.float32(header[fields.ZERO])
        if header[fields.ZEROS_PLACE] != NOT_THERE:
            zero = np.float32(memory[header[fields.ZEROS_PLACE] + unit // (units // count) * HALF + lane])
        least = np.float32(0.0)
        if header[fields.LEAST_PLACE] != NOT_THERE:
            least = _number(
                half,
                lane,
                unit,
                units,
                int(header[fields.LEAST_PLACE]),
                header[fields.LEAST_WIDE],
                int(header[fields.LEAST_COUNT]),
                int(header[fields.LEAST_STEPS_PLACE]),
            )
        for c in range(unit * unit_inputs, (unit + 1) * unit_inputs):
            code = _code(memory, int(header[fields.CODES_PLACE]), bits, lane, c)
            to[c] = (_value(code, bits, header, table) - zero) * scale + least


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _number(half: int, lane: int, unit: int, units: int, place: int, wide: int, count: int, steps_place: int) -> Any:
    """Return the scale or the minimum of a unit: base * step."""
    row = unit // (units // count) * HALF + lane
    if wide:
        number = carray(pointer(half + place), count * HALF, np.float32)[row]
    else:
        number = _of_half(np.int32(carray(pointer(half + place), count * HALF, np.uint16)[row]))
    if steps_place != NOT_THERE:
        number *= np.float32(carray(pointer(half + steps_place), units * HALF, np.int8)[unit * HALF + lane])
    return number


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _of_half(bits: np.int32) -> Any:
    """Return the float32 of a float16's bits."""
    magnitude = np.int32((bits & np.int32(0x7FFF)) << _HALF_SHIFT)
    if bits & _HALF_INFINITE == _HALF_INFINITE:
        number = number_of(np.int32(magnitude | _INFINITE))
    else:
        number = number_of(magnitude) * _HALF_FACTOR
    return -number if bits & np.int32(0x8000) else number


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _code(memory: Any, begin: int, bits: int, lane: int, c: int) -> int:
    """Return the code of an input."""
    step = c % GROUP_INPUTS // WORD_BYTES
    group = begin + c // GROUP_INPUTS * bits * HALF * LANE_BYTES
    byte = group + lane * LANE_BYTES + _BYTE_OF_INPUT[c % WORD_BYTES]
    word_bytes = HALF * LANE_BYTES
    if bits == FP8_BITS:
        return int(memory[byte + step * word_bytes])
    code = int(memory[byte + step // 2 * word_bytes]) >> step % 2 * 4 & 15
    if bits == SHORT_BITS:
        pairs = int(memory[byte + (_NIBBLE_WORDS + step // _STEPS_OF_PAIRS) * word_bytes])
        code |= (pairs >> step % _STEPS_OF_PAIRS * 2 & 3) << 4
    elif bits > 4:
        code |= (int(memory[byte + _NIBBLE_WORDS * word_bytes]) >> step & 1) << 4
    return code


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _value(code: int, bits: int, header: Any, table: Any) -> Any:
    """Return what a code stands for."""
    kind = header[fields.KIND]
    if kind == fields.NUMBERS:
        return np.float32(code)
    if kind == fields.PLACES_OF_BYTES:
        return np.float32(header[fields.TABLE + code // LANE_BYTES] >> code % LANE_BYTES * 8 & 255)
    if bits == FP8_BITS:
        magnitude = number_of(np.int32((code & 0x7F) << _FP8_SHIFT)) * _FP8_FACTOR
        return -magnitude if code & 0x80 else magnitude
    return table[code]
