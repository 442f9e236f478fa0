"""The format of panels of codes: several kinds of codes in one, since each panel says of which kind it is.

A panel is a header, then two halves of 32 outputs. A half is its scales, zeros and minimums, as the file has them, then
groups of codes as code_groups.py describes them. Or it is a header and words of bfloat16, as in word_format.py. So
the matrices of a model, and the products of one phase, may have any kinds, and all are compiled once. coded_panels.py
lays panels out.

An operand is multiplied as fixed-point digits of 16 bits (fixed_point.py), for which each core has room of its own,
and for the scales of the halves that it multiplies, as float32. By codes that are floats it is multiplied as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from model_worker.cpu.gemm.weight_format import HALF, HALVES, LANE_BYTES, PANEL
from model_worker.cpu.gemm.word_format import multiply_words, word_steps
from model_worker.cpu.simd.code_groups import TABLE_VALUES
from model_worker.cpu.simd.dot_bf16 import STEP_BYTES
from model_worker.cpu.simd.dot_codes import (
    CODED_DIGITS,
    CODED_ROWS,
    GROUP_INPUTS,
    SHORT_BITS,
    SUM_INPUTS,
    finish_codes,
    multiply_codes,
)
from model_worker.cpu.simd.dot_floats import multiply_floats
from model_worker.cpu.simd.elements import INSIDE, carray, pointer
from model_worker.cpu.simd.fixed_point import BASE, room_for, split, split_row
from model_worker.cpu.simd.group_numbers import expand_numbers, expand_zeros

# The header of a panel, int32: what each of its numbers is. Places are bytes from the beginning of a half, -1 for what
# is not there; a count is that of an output's numbers, each for as many units. A unit is a group, or half of one for
# SHORT_BITS. Steps are int8, one for each unit; zeros are bytes, as many as scales. KIND is what codes are: numbers, as
# a rule, places of the table of bytes at TABLE, or floats: FP8, or places of the table of float32 at TABLE.
(
    BITS,
    HALF_BYTES,
    GROUPS,
    CODES_PLACE,
    ZERO,
    SCALES_WIDE,
    SCALES_COUNT,
    STEPS_PLACE,
    ZEROS_PLACE,
    LEAST_PLACE,
    LEAST_WIDE,
    LEAST_COUNT,
    LEAST_STEPS_PLACE,
    KIND,
    NAMED,
) = range(15)
TABLE = 16
NUMBERS, PLACES_OF_BYTES, FLOATS = range(3)
# Numbers of a header: as many as fill two lines of memory.
FIELDS = TABLE + TABLE_VALUES
HEADER_BYTES = 4 * FIELDS
# Bits of weights that are bfloat16: some matrices of a quantised model are left so, lm_head as a rule.
WORD_BITS = 16
NOT_THERE = -1
# Halves of panels whose scales a core keeps: two panels are multiplied in turns where one is gate and the other up.
_KEPT_HALVES = 2 * HALVES


class CodedDigits(NamedTuple):
    """Buffers for rows of an operand as fixed_point.Digits, with sums: a core's own, or with the core first."""

    values: NDArray[Any]
    starts: NDArray[np.int32]
    factors: NDArray[np.float32]
    sums: NDArray[np.int32]  # [rows * inputs / SUM_INPUTS]: of the whole numbers that the digits say


class Expanded(NamedTuple):
    """The scales and minimums of some halves, as float32: a core's own, or with the core first."""

    scales: NDArray[np.float32]  # [halves, units, HALF]
    least: NDArray[np.float32]  # the same shape
    places: NDArray[np.int64]  # [halves + 1]: the halves' addresses, and which is replaced next


class CodedFormat(NamedTuple):
    """Panels of codes. A panel is the address of a half, and that of the panel's header."""

    like: NDArray[np.uint16]  # for the number of digits: activations keep 16 bits, whatever the model's type
    digits: CodedDigits
    expanded: Expanded
    ordered: NDArray[np.float32]  # [inputs]: a row in the order of panels; a core's own, or with the core first

    def of_core(self, core: int) -> CodedFormat:
        digits = self.digits
        kept = self.expanded
        own = CodedDigits(digits.values[core], digits.starts[core], digits.factors[core], digits.sums[core])
        expanded = Expanded(kept.scales[core], kept.least[core], kept.places[core])
        return CodedFormat(self.like, own, expanded, self.ordered[core])

    def prepare(self, operand: Any) -> None:
        self.prepare_in_order(operand, 0)

    def prepare_in_order(self, operand: Any, order: int) -> None:
        width = operand.shape[1]
        if order:
            _split_in_order(operand, carray(pointer(order), width, np.int32), self.like, self.digits, self.ordered)
        else:
            split(operand, self.like, self.digits)
        _sum_digits(self.digits.values, len(operand), width, self.digits.sums)
        self.expanded.places[:] = 0

    def piece_rows(self) -> int:
        return CODED_ROWS

    def passes(self, rows: int, whole: bool) -> int:
        return 1

    def panel_at(self, operand: Any, panels: int, unit: int) -> tuple[int, int]:
        half = half_bytes_of(panels)
        panel = panels + (unit // HALVES) * (HEADER_BYTES + HALVES * half)
        if bits_of(panels) == WORD_BITS:
            half = HALF * LANE_BYTES
        return panel + HEADER_BYTES + (unit % HALVES) * half, panel

    def layout(self, operand: Any, panel: tuple[int, int]) -> tuple[int, int, int]:
        if bits_of(panel[1]) == WORD_BITS:
            return 0, STEP_BYTES, word_steps(operand, self.like)
        steps = operand.shape[1] // GROUP_INPUTS
        return 0, HALVES * half_bytes_of(panel[1]) // steps, steps

    def multiply(
        self, operand: Any, first: int, rows: int, panel: tuple[int, int], whole: bool, prefetching: Any, tile: Any
    ) -> None:
        place, header = panel
        if bits_of(header) == WORD_BITS:
            multiply_words(operand, self.like, first, rows, place, whole, prefetching, tile)
            return
        _multiply_half(operand, self.digits, self.expanded, first, rows, place, header, 0, prefetching, tile)
        if whole:
            place += half_bytes_of(header)
            _multiply_half(operand, self.digits, self.expanded, first, rows, place, header, HALF, prefetching, tile)


def coded_format(cores: int, rows: int, elements: int, inputs: int) -> CodedFormat:
    """Return the format of panels of codes.

    Operands have at most `rows` rows, `elements` elements, and `inputs` inputs each.
    """
    like = np.empty(1, np.uint16)
    values, starts, factors = room_for(cores, rows, elements, like)
    shape = cores, _KEPT_HALVES, -(-inputs // SUM_INPUTS), HALF
    return CodedFormat(
        like,
        CodedDigits(values, starts, factors, np.zeros((cores, elements // SUM_INPUTS), np.int32)),
        Expanded(np.zeros(shape, np.float32), np.zeros(shape, np.float32), np.zeros((cores, _KEPT_HALVES + 1), int)),
        np.zeros((cores, inputs), np.float32),
    )


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _split_in_order(operand: Any, order: Any, like: Any, digits: Any, ordered: Any) -> None:
    """Split the rows of an operand into digits, input number order[c] as number c."""
    width = len(order)
    for row in range(len(operand)):
        values = operand[row]
        for c in range(width):
            ordered[c] = values[order[c]]
        split_row(row, ordered[:width], like, digits)


@njit(nogil=True, cache=True, **INSIDE)
def half_bytes_of(header: int) -> int:
    """Return the bytes of half a panel, given the address of the panel."""
    return int(carray(pointer(header), FIELDS, np.int32)[HALF_BYTES])


@njit(nogil=True, cache=True, **INSIDE)
def bits_of(header: int) -> int:
    """Return the bits of a weight, given the address of its panel."""
    return int(carray(pointer(header), FIELDS, np.int32)[BITS])


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _sum_digits(values: Any, rows: int, width: int, sums: Any) -> None:
    """Sum what the digits of rows say, SUM_INPUTS inputs at a time."""
    of_row = width // SUM_INPUTS
    for row in range(rows):
        own = values[row * CODED_DIGITS * width : (row + 1) * CODED_DIGITS * width]
        for number in range(of_row):
            total = np.int32(0)
            for digit in range(CODED_DIGITS):
                begin = digit * width + number * SUM_INPUTS
                share = np.int32(0)
                for c in range(begin, begin + SUM_INPUTS):
                    share = np.int32(share + own[c])
                total = np.int32(total * BASE + share)
            sums[row * of_row + number] = total


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _expand(place: int, header: Any, units: int, scales: int, least: int) -> None:
    """Write the scales of a half, and its minimums if it has any, as float32 [units, HALF] at these addresses."""
    count = int(header[SCALES_COUNT])
    steps = place + header[STEPS_PLACE] if header[STEPS_PLACE] != NOT_THERE else 0
    expand_numbers(place, int(header[SCALES_WIDE]), count, units // count, steps, scales)
    if header[ZEROS_PLACE] != NOT_THERE:
        expand_zeros(place + header[ZEROS_PLACE], count, units // count, scales, least)
    if header[LEAST_PLACE] != NOT_THERE:
        count = int(header[LEAST_COUNT])
        steps = place + header[LEAST_STEPS_PLACE] if header[LEAST_STEPS_PLACE] != NOT_THERE else 0
        expand_numbers(place + header[LEAST_PLACE], int(header[LEAST_WIDE]), count, units // count, steps, least)


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _expanded(place: int, header: Any, units: int, in_pieces: bool, expanded: Any) -> int:
    """Return which kept half has the scales of the half at this address. They are expanded if none has."""
    places = expanded.places
    kept = 0
    if in_pieces:
        for number in range(_KEPT_HALVES):
            if places[number] == place:
                return number
        kept = places[_KEPT_HALVES]
        places[_KEPT_HALVES] = (kept + 1) % _KEPT_HALVES
    places[kept] = place
    _expand(place, header, units, expanded.scales[kept].ctypes.data, expanded.least[kept].ctypes.data)
    return kept


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _multiply_half(
    operand: Any,
    digits: Any,
    expanded: Any,
    first: int,
    rows: int,
    place: int,
    header_place: int,
    column: int,
    prefetching: Any,
    tile: Any,
) -> None:
    """Compute tile[r, column : column + HALF] = operand[first + r] . the half at this address."""
    header = carray(pointer(header_place), FIELDS, np.int32)
    bits = int(header[BITS])
    width = operand.shape[1]
    # There may be other rows, which want the same scales.
    in_pieces = len(operand) > CODED_ROWS
    unit_sums = 1 if bits == SHORT_BITS else GROUP_INPUTS // SUM_INPUTS
    groups = int(header[GROUPS])
    units = width // (SUM_INPUTS * unit_sums)
    kept = _expanded(place, header, units, in_pieces, expanded)
    scales = expanded.scales[kept].ctypes.data
    least = expanded.least[kept].ctypes.data
    units_with_least = units if header[LEAST_PLACE] != NOT_THERE or header[ZEROS_PLACE] != NOT_THERE else 0
    codes = place + int(header[CODES_PLACE])
    table = header_place + TABLE * header.itemsize
    # The descriptor counts whole panels: their halves lie one after the other.
    ahead, move, switch, jump = prefetching
    begun = groups if column else 0
    asked = ahead + begun * (move // HALVES), move // HALVES, HALVES * switch - begun, jump
    done = 0
    while done < rows:
        some = CODED_ROWS if rows - done >= CODED_ROWS else min(rows - done, 2)
        to = tile[done : done + some]
        row = first + done
        if header[KIND] == FLOATS:
            multiply_floats(bits, operand, row, some, table, codes, scales, groups, asked, to, column)
        else:
            of_bytes = table if header[KIND] == PLACES_OF_BYTES else 0
            zero = header[ZERO]
            multiply_codes(bits, digits, width, row, some, zero, codes, scales, groups, of_bytes, asked, to, column)
            finish_codes(digits, width, row, some, least, units_with_least, unit_sums, to, column)
        done += some


assert PANEL == HALVES * HALF
