"""How codes lie in memory when they are multiplied: panels, as coded_format.py finds them there.

Knows codes (codes.py), and the order of words in a group (code_groups.py). Does not know linear layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model_worker.cpu.gemm import coded_format as fields
from model_worker.cpu.gemm.coded_format import FIELDS, HEADER_BYTES, NOT_THERE
from model_worker.cpu.gemm.weight_format import HALF, HALVES, PANEL
from model_worker.cpu.simd.code_groups import HAS_BYTE_TABLES, TABLE_VALUES
from model_worker.cpu.simd.dot_codes import GROUP_INPUTS, SHORT_BITS, SUM_INPUTS
from model_worker.cpu.simd.dot_floats import FP8_BITS, PLACE_BITS
from model_worker.cpu.simd.fixed_point import PLACES, WORD_BYTES
from shared.weight_codes import E4M3, Codes, Grouped

# Bits of codes that panels hold as they are. A code of fewer bits is held in the next larger ones.
BITS = (4, 5, 6, 8)
_LINE_BYTES = 64
_STEPS = GROUP_INPUTS // WORD_BYTES
# The input of a step for each byte of a word, and the byte for each input.
_INPUT_OF_BYTE = np.array(PLACES)
_BYTE_OF_INPUT = np.argsort(_INPUT_OF_BYTE)


class UnsupportedCodes(ValueError):
    """Panels cannot hold these codes; the message completes "since"."""


class Numbers(NamedTuple):
    """Where numbers of groups lie in half a panel."""

    place: int
    dtype: np.dtype[Any]
    groups: int


class Layout(NamedTuple):
    """How the codes of a weight lie in memory."""

    bits: int
    inputs: int
    units: int  # of each output: groups, or halves of groups for SHORT_BITS
    zero: int
    numbers: dict[str, Numbers]  # scales, steps, zeros, least, least_steps: those that there are
    codes_place: int
    table: bytes = b""  # the bytes or float32 that codes stand for; none: they are numbers themselves
    kind: int = fields.NUMBERS

    @property
    def values(self) -> NDArray[Any] | None:
        """What codes stand for, by their number; None: they are numbers themselves."""
        if self.kind == fields.NUMBERS:
            return None
        return np.frombuffer(self.table, np.float32 if self.kind == fields.FLOATS else np.uint8)

    @property
    def half_bytes(self) -> int:
        return self.codes_place + self.inputs // GROUP_INPUTS * self.bits * 4 * HALF

    @property
    def panel_bytes(self) -> int:
        return HEADER_BYTES + HALVES * self.half_bytes

    def header(self) -> NDArray[np.int32]:
        """Return the header of each panel."""
        header = np.full(FIELDS, NOT_THERE, np.int32)
        header[fields.BITS] = self.bits
        header[fields.HALF_BYTES] = self.half_bytes
        header[fields.GROUPS] = self.inputs // GROUP_INPUTS
        header[fields.CODES_PLACE] = self.codes_place
        header[fields.ZERO] = self.zero
        header[fields.KIND] = self.kind
        # That of FP8 is known.
        values = np.frombuffer(self.table, np.int32)[:TABLE_VALUES]
        header[fields.TABLE : fields.TABLE + len(values)] = values
        for name, numbers in self.numbers.items():
            place = getattr(fields, f"{name.upper()}_PLACE", None)
            if place is not None:
                header[place] = numbers.place
            count = getattr(fields, f"{name.upper()}_COUNT", None)
            if count is not None:
                header[count] = numbers.groups
            wide = getattr(fields, f"{name.upper()}_WIDE", None)
            if wide is not None:
                header[wide] = int(numbers.dtype == np.float32)
        return header


def normalised(codes: Codes) -> Codes:
    """Return the same weight without a table, in codes of as many bits as panels hold, with steps for each unit."""
    codes = _without_table(codes)
    inputs = codes.codes.shape[1]
    groups = [codes.scales, *([] if codes.minimums is None else [codes.minimums])]
    counts = {array.shape[1] for group in groups for array in group if array is not None}
    if inputs % GROUP_INPUTS:
        raise UnsupportedCodes(f"{inputs} inputs are not a multiple of {GROUP_INPUTS}")
    is_short = any(inputs // count < GROUP_INPUTS for count in counts)
    unit = SUM_INPUTS if is_short or codes.bits == SHORT_BITS else GROUP_INPUTS
    if any(inputs % count or inputs // count % unit for count in counts):
        raise UnsupportedCodes(f"its groups are not of {SUM_INPUTS}, or of multiples of {GROUP_INPUTS} inputs")
    if not isinstance(codes.zeros, int):
        plain = codes.minimums is None and codes.scales.steps is None
        if not plain or codes.zeros.shape[1] != codes.scales.groups:
            raise UnsupportedCodes("its zeros are not those of its scales, or it has steps or minimums, too")
    bits = codes.bits
    if is_short and (bits > SHORT_BITS or codes.table is not None):
        raise UnsupportedCodes(f"its groups of {SUM_INPUTS} have a table, or codes of more than {SHORT_BITS} bits")
    return codes._replace(
        bits=SHORT_BITS if is_short else max(min(BITS), bits if bits < 7 else 8),
        scales=_by_unit(codes.scales, inputs // unit),
        minimums=None if codes.minimums is None else _by_unit(codes.minimums, inputs // unit),
    )


def _without_table(codes: Codes) -> Codes:
    """Return the same weight with the values of its table as codes, above the least of them.

    Tables stay whose places panels hold: floats, and sixteen bytes where there are instructions for them.
    """
    if codes.table is None:
        return codes
    if codes.table.dtype == np.float32:
        return _checked_floats(codes)
    if not isinstance(codes.zeros, int):
        raise UnsupportedCodes("it has a table and zeros")
    least = int(codes.table.min())
    values = (codes.table.astype(np.int16) - least).astype(np.uint8)
    zero = codes.zeros - least
    inputs = codes.codes.shape[1]
    if HAS_BYTE_TABLES and len(values) == TABLE_VALUES and inputs // codes.scales.groups >= GROUP_INPUTS:
        return codes._replace(bits=PLACE_BITS, zeros=zero, table=values)
    bits = int(values.max()).bit_length()
    return codes._replace(codes=values[codes.codes], bits=bits, zeros=zero, table=None)


def _checked_floats(codes: Codes) -> Codes:
    """Return codes that are floats. UnsupportedCodes if not all are numbers, or if they have more than scales."""
    table = codes.table
    is_fp8 = codes.bits == FP8_BITS and np.array_equal(table, E4M3, equal_nan=True)  # type: ignore[arg-type]
    if table is None or not (is_fp8 or (codes.bits == PLACE_BITS and len(table) == TABLE_VALUES)):
        raise UnsupportedCodes("its table of floats is neither that of FP8 (e4m3) nor of sixteen values")
    if not isinstance(codes.zeros, int) or codes.zeros or codes.minimums is not None or codes.order is not None:
        raise UnsupportedCodes("its codes are floats with zeros, minimums or an order")
    if not bool(np.isfinite(table[codes.codes]).all()):
        raise UnsupportedCodes("it has codes of floats that are not finite")
    return codes


def _by_unit(numbers: Grouped, units: int) -> Grouped:
    steps = numbers.steps
    return Grouped(numbers.base, None if steps is None else np.repeat(steps, units // steps.shape[1], axis=1))


def layout_of(codes: Codes) -> Layout:
    """Return how these codes lie in memory, and those of the same weight's other outputs."""
    inputs = codes.codes.shape[1]
    unit = SUM_INPUTS if codes.bits == SHORT_BITS else GROUP_INPUTS
    place = 0
    numbers = {}
    for name, array in _arrays(codes).items():
        numbers[name] = Numbers(place, array.dtype, array.shape[1])
        place += array.shape[1] * HALF * array.dtype.itemsize
    zero = codes.zeros if isinstance(codes.zeros, int) else 0
    codes_place = -(-place // _LINE_BYTES) * _LINE_BYTES
    table = b"" if codes.table is None else codes.table.tobytes()
    kind = fields.NUMBERS
    if codes.table is not None:
        kind = fields.FLOATS if codes.table.dtype == np.float32 else fields.PLACES_OF_BYTES
    return Layout(codes.bits, inputs, inputs // unit, zero, numbers, codes_place, table, kind)


def _arrays(codes: Codes) -> dict[str, NDArray[Any]]:
    """Return the arrays [outputs, groups] that there are, in the order in which they lie in memory."""
    least = codes.minimums
    found = {
        "scales": _as_float(codes.scales.base),
        "steps": _as_int8(codes.scales.steps),
        "zeros": None if isinstance(codes.zeros, int) else codes.zeros.astype(np.uint8),
        "least": None if least is None else _as_float(least.base),
        "least_steps": None if least is None else _as_int8(least.steps),
    }
    return {name: array for name, array in found.items() if array is not None}


def _as_float(array: NDArray[Any]) -> NDArray[Any]:
    return array if array.dtype == np.float16 else array.astype(np.float32)


def _as_int8(array: NDArray[Any] | None) -> NDArray[np.int8] | None:
    if array is None:
        return None
    if array.size and array.max() > np.iinfo(np.int8).max:
        raise UnsupportedCodes("the steps of its scales are larger than 127")
    return array.astype(np.int8)


def pack(codes: Codes, layout: Layout, halves: NDArray[np.uint8]) -> None:
    """Write the codes of some outputs to halves [panel, half, bytes], padded with zeros.

    A half begins with the numbers of its groups, [group, HALF] each; then come the words of codes, [group, word, HALF].
    """
    if layout_of(codes) != layout:
        raise UnsupportedCodes("the parts of a weight have different layouts")
    count = len(halves) * HALVES
    padding = ((0, count * HALF - len(codes.codes)), (0, 0))
    for name, array in _arrays(codes).items():
        padded = np.pad(array, padding).reshape(count, HALF, -1).transpose(0, 2, 1)
        place = layout.numbers[name].place
        bytes_of = np.ascontiguousarray(padded).view(np.uint8).reshape(-1, HALVES, padded[0].nbytes)
        halves[..., place : place + bytes_of.shape[-1]] = bytes_of
    steps = np.pad(codes.codes, padding).reshape(count * HALF, -1, _STEPS, WORD_BYTES)[..., _INPUT_OF_BYTE]
    words = _words(steps, layout.bits).reshape(count, HALF, -1).transpose(0, 2, 1)
    halves[..., layout.codes_place :] = np.ascontiguousarray(words).view(np.uint8).reshape(-1, HALVES, words[0].nbytes)


def _words(steps: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Return codes [.., group, step, byte] as words [.., group, word]: dot_codes.py says how they lie there."""
    if bits == 8:
        return np.ascontiguousarray(steps).view(np.uint32)[..., 0]
    nibbles = (steps[..., 0::2, :] & 15) | steps[..., 1::2, :] << 4
    upper = steps >> 4
    planes = []
    if bits == 5:
        planes = [_joined([upper[..., step, :] << step for step in range(_STEPS)])]
    elif bits == SHORT_BITS:
        half = _STEPS // 2
        planes = [_joined([upper[..., first + i, :] << 2 * i for i in range(half)]) for first in (0, half)]
    every = np.concatenate([nibbles, *(plane[..., None, :] for plane in planes)], axis=-2)
    return np.ascontiguousarray(every).view(np.uint32)[..., 0]


def _joined(parts: list[NDArray[Any]]) -> NDArray[np.uint8]:
    """Return parts joined that have no bits in common."""
    joined: NDArray[np.uint8] = np.bitwise_or.reduce(parts)
    return joined


def _steps_of(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """Return the codes that `_words` has made words of."""
    every = np.ascontiguousarray(words)[..., None].view(np.uint8)
    if bits == 8:
        return every
    nibbles = every[..., :4, :]
    steps = np.stack([nibbles & 15, nibbles >> 4], axis=-2).reshape(*nibbles.shape[:-2], _STEPS, WORD_BYTES)
    for step in range(_STEPS):
        if bits == 5:
            steps[..., step, :] |= (every[..., 4, :] >> step & 1) << 4
        elif bits == SHORT_BITS:
            steps[..., step, :] |= (every[..., 4 + step // 4, :] >> 2 * (step % 4) & 3) << 4
    return steps


def unpacked(layout: Layout, halves: NDArray[np.uint8], numbers: NDArray[np.int64]) -> Codes:
    """Return the codes of some outputs, out of halves [panel, half, bytes]."""
    panel, half, lane = numbers // PANEL, numbers % PANEL // HALF, numbers % HALF

    def at(place: int, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        part = halves[..., place : place + count * HALF * dtype.itemsize].view(dtype)
        strides = *part.strides[:2], HALF * dtype.itemsize, dtype.itemsize
        found: NDArray[Any] = np.lib.stride_tricks.as_strided(part, (*part.shape[:2], count, HALF), strides)
        return found[panel, half, :, lane]

    found = {name: at(*place) for name, place in layout.numbers.items()}
    groups = layout.inputs // GROUP_INPUTS
    words = at(layout.codes_place, np.dtype(np.uint32), groups * layout.bits)
    steps = _steps_of(words.reshape(len(numbers), groups, layout.bits), layout.bits)
    return Codes(
        codes=steps[..., _BYTE_OF_INPUT].reshape(len(numbers), layout.inputs),
        bits=layout.bits,
        scales=Grouped(found["scales"], found.get("steps")),
        zeros=found.get("zeros", layout.zero),
        minimums=Grouped(found["least"], found.get("least_steps")) if "least" in found else None,
        table=layout.values,
    )
