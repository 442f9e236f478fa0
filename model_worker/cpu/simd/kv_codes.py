"""K and V in codes of 8 bits: from a token's elements to codes and a scale, and from codes to cache_dot.py's words.

attention/coded.py says what codes and scales are, and their order. A group's codes become words in a core's own memory,
where the products of cache_dot.py read them; scales are applied to scores and weights (softmax.py). Knows LLVM. Does
not know sequences. Indices are not checked.
"""

from __future__ import annotations

from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types

from model_worker.cpu.simd.cache_dot import GROUP, PANEL_GROUPS
from model_worker.cpu.simd.dot_bf16 import FLOATS, LANES, WORDS, prefetch
from model_worker.cpu.simd.elements import INSIDE, carray, magnitude, number_of, pointer, widened

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic

# The kinds of elements in a cache: words as cache_dot.py has them, or codes.
IN_WORDS, INT8, FP8 = range(3)
# Bytes of a word of a panel, and of a pair of codes.
_WORD_BYTES = 4
_PAIR_BYTES = 2
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
# A float32 with the exponent and the mantissa of an 8-bit float in its upper bits is too small by this factor.
_OFFSET = 2.0**120

_MOST_INT8 = np.float32(127.0)
_MOST_FP8 = np.float32(448.0)
_NOTHING = np.float32(1e-30)
# Bits of float32: infinity, and the least 8-bit float that is not subnormal.
_INFINITE_BITS = 0x7F800000
_NORMAL_BITS = 0x3C800000
# Added to a number, they leave it in the last bits: whole, or in units of the least 8-bit float.
_TO_WHOLE = np.float32(12582912.0)
_TO_SUBNORMAL = np.float32(16384.0)
_SUBNORMAL_BITS = 0x46800000
# Bits of the mantissa that an 8-bit float lacks, and what its exponent is less by, above its mantissa.
_LACKING_BITS = 20
_LESS_EXPONENT = 960


def _every(value: int) -> Any:
    return ir.Constant(WORDS, [value] * LANES)


def _integers(builder: Any, pairs: Any) -> list[Any]:
    """Return the lower and the upper int8 of pairs as float32."""
    words = builder.sext(pairs, WORDS)
    lower = builder.ashr(builder.shl(words, _every(24)), _every(24))
    return [builder.sitofp(lower, FLOATS), builder.sitofp(builder.ashr(words, _every(8)), FLOATS)]


def _floats(builder: Any, pairs: Any) -> list[Any]:
    """Return the lower and the upper 8-bit float of pairs as float32."""
    words = builder.zext(pairs, WORDS)
    found = []
    for code in (words, builder.lshr(words, _every(8))):
        number = builder.shl(builder.and_(code, _every(0x7F)), _every(_LACKING_BITS))
        value = builder.fmul(builder.bitcast(number, FLOATS), ir.Constant(FLOATS, [_OFFSET] * LANES))
        sign = builder.shl(builder.and_(code, _every(0x80)), _every(24))
        found.append(builder.bitcast(builder.or_(builder.bitcast(value, WORDS), sign), FLOATS))
    return found


def _widen(values_of: Any) -> Any:
    """Make an intrinsic that widens sixteen pairs of codes, which are neighbours, to words of `like`."""

    @intrinsic
    def widen(typing: Any, like: Any, source: Any, lower: Any, upper: Any, ahead: Any) -> Any:
        """Addresses: of the pairs, of sixteen words for them, or two times sixteen, and of a line to prefetch."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            prefetch(builder, builder.inttoptr(args[4], ir.IntType(8).as_pointer()))
            pairs = builder.load(builder.inttoptr(args[1], _SHORTS.as_pointer()), align=2)
            first, second = values_of(builder, pairs)
            places = [builder.inttoptr(place, WORDS.as_pointer()) for place in args[2:4]]
            bits = [builder.bitcast(value, WORDS) for value in (first, second)]
            if signature.args[0].dtype == types.uint16:
                # Codes have less bits than a bfloat16, so nothing is rounded.
                both = builder.or_(builder.lshr(bits[0], _every(16)), builder.and_(bits[1], _every(0xFFFF0000)))
                builder.store(both, places[0], align=4)
            else:
                for word, place in zip(bits, places, strict=True):
                    builder.store(word, place, align=4)
            return context.get_dummy_value()

        return types.void(like, *(types.int64,) * 4), codegen

    return widen


_widen_int8 = _widen(_integers)
_widen_fp8 = _widen(_floats)


@njit(nogil=True, cache=True, **INSIDE)
def _widen_pairs(kind: int, like: Any, source: int, lower: int, upper: int, ahead: int) -> None:
    if kind == INT8:
        _widen_int8(like, source, lower, upper, ahead)
    else:
        _widen_fp8(like, source, lower, upper, ahead)


@njit(nogil=True, cache=True, **INSIDE)
def widen_keys(kind: int, group: int, codes: int, size: int, ahead: int, words: Any) -> Any:
    """Widen K of group number `group` of a panel into `words`. Returns the address where the group begins there.

    `codes` is the group's address in a block of `size` tokens. Meanwhile as much is prefetched from `ahead` on. The
    words are those of whole panels: PANEL_GROUPS groups lie side by side.
    """
    line = PANEL_GROUPS * GROUP * _WORD_BYTES
    begin = words.ctypes.data + group * GROUP * _WORD_BYTES
    in_pairs = words.itemsize == _PAIR_BYTES
    pairs = len(words) // (PANEL_GROUPS * GROUP * 2)
    for pair in range(pairs):
        lower = begin + (pair if in_pairs else 2 * pair) * line
        further = pair * GROUP * _PAIR_BYTES
        _widen_pairs(kind, words, codes + pair * size * _PAIR_BYTES, lower, lower + line, ahead + further)
    return begin


@njit(nogil=True, cache=True, **INSIDE)
def widen_values(kind: int, group: int, codes: int, ahead: int, words: Any) -> Any:
    """Widen V of group number `group` of a panel into `words`, as `widen_keys`."""
    width = len(words) // (PANEL_GROUPS * GROUP)
    begin = words.ctypes.data + group * GROUP * width * words.itemsize
    in_pairs = words.itemsize == _PAIR_BYTES
    for pair in range(GROUP // 2):
        for element in range(0, width, LANES):
            place = pair * width + element
            lower = begin + (place if in_pairs else place + pair * width) * _WORD_BYTES
            further = place * _PAIR_BYTES
            _widen_pairs(kind, words, codes + further, lower, lower + width * _WORD_BYTES, ahead + further)
    return begin


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def encode_token(kind: int, values: Any, to: int, pair_bytes: int, odd_bytes: int, scale: int) -> None:
    """Write a token's elements of one head as codes, and their scale at the address `scale`.

    Element d goes to the byte d // 2 * pair_bytes + d % 2 * odd_bytes from the address `to` on.
    """
    bits = np.int32(0)
    for d in range(len(values)):
        bits = np.int32(max(bits, magnitude(values[d])))
    largest = number_of(bits)
    most = _MOST_INT8 if kind == INT8 else _MOST_FP8
    inverse = np.float32(0.0)
    if bits < _INFINITE_BITS and largest > _NOTHING:
        inverse = most / largest
    carray(pointer(scale), (1,), np.float32)[0] = largest / most
    memory = carray(pointer(to), (len(values) // 2 * pair_bytes,), np.uint8)
    for d in range(len(values)):
        share = widened(values[d]) * inverse
        code = np.int32(0)
        if kind == INT8:
            code = magnitude(share + _TO_WHOLE)
        elif bits < _INFINITE_BITS:
            code = _fp8_of(share)
        memory[d // 2 * pair_bytes + d % 2 * odd_bytes] = np.uint8(code & 0xFF)


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _fp8_of(value: Any) -> Any:
    """Return the nearest 8-bit float (e4m3), even among two, of a number whose magnitude is at most the largest."""
    bits = magnitude(value)
    if bits < _NORMAL_BITS:
        code = magnitude(number_of(bits) + _TO_SUBNORMAL) - _SUBNORMAL_BITS
    else:
        odd = bits >> _LACKING_BITS & 1
        code = (bits + (1 << _LACKING_BITS - 1) - 1 + odd >> _LACKING_BITS) - _LESS_EXPONENT
    return np.int32(code | 0x80) if value < np.float32(0.0) else np.int32(code)
