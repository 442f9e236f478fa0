"""Numbers between registers and memory: float32 as the elements of an array, which may be bfloat16's bits.

Also addresses as pointers. Does not know the meaning of arrays.
"""

from __future__ import annotations

from typing import Any

import numba
import numba.core.cgutils
import numba.extending
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic
_numba: Any = numba
# Makes an array of a pointer.
carray = _numba.carray

# numba options of functions that only compiled ones call: without the wrappers for other callers they take a fifth less
# to compile. Called from Python they end the process.
INSIDE: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


# Reassociation lets a dot product fill vector registers. Nothing here assumes that NaN and infinity do not occur.
MATH = {"reassoc", "contract", "arcp", "nsz"}


@intrinsic
def element(typing: Any, value: Any, like: Any) -> Any:
    """Convert a float32 to an element of the array `like`: itself, or the bits of the nearest bfloat16 (even among
    two)."""

    def bfloat16(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        sixteen = ir.Constant(word, 16)
        one = ir.Constant(word, 1)
        odd = builder.and_(builder.lshr(bits, sixteen), one)
        # A NaN stays one: those that arithmetic makes have no bits set that this sum could carry over.
        rounded = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
        return builder.trunc(builder.lshr(rounded, sixteen), ir.IntType(16))

    def float32(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0]

    return like.dtype(types.float32, like), bfloat16 if like.dtype == types.uint16 else float32


@intrinsic
def widened(typing: Any, value: Any) -> Any:
    """Convert an element, a float32 or a bfloat16's bits, to float32."""

    def bfloat16(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], word), ir.Constant(word, 16)), ir.FloatType())

    def float32(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0]

    return types.float32(value), bfloat16 if value == types.uint16 else float32


@intrinsic
def magnitude(typing: Any, value: Any) -> Any:
    """Return an element's magnitude as a whole number of the same order; a value that is not finite is the largest."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        if value == types.uint16:
            bits = builder.shl(builder.zext(args[0], word), ir.Constant(word, 16))
        else:
            bits = builder.bitcast(args[0], word)
        return builder.and_(bits, ir.Constant(word, 0x7FFFFFFF))

    return types.int32(value), codegen


@intrinsic
def number_of(typing: Any, bits: Any) -> Any:
    """Return the float32 that has these bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """Convert an address to a pointer as numba's `carray` takes it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@intrinsic
def borrowed(typing: Any, value: Any) -> Any:
    """Borrow an array, or a tuple of arrays and others: no references to its arrays are counted.

    numba counts references with atomic operations, of slices too. Where the cores of a thread pool slice the same
    array, its count goes back and forth between their caches. The caller must hold the array as long as the borrowed
    one is used.
    """

    def one(context: Any, builder: Any, kind: Any, value: Any) -> Any:
        if isinstance(kind, types.Array):
            array = context.make_array(kind)(context, builder, value)
            array.meminfo = numba.core.cgutils.get_null_value(array.meminfo.type)
            array.parent = numba.core.cgutils.get_null_value(array.parent.type)
            return array._getvalue()
        if isinstance(kind, types.BaseTuple):
            fields = numba.core.cgutils.unpack_tuple(builder, value)
            kinds: Any = kind
            uncounted = [one(context, builder, kinds[i], field) for i, field in enumerate(fields)]
            return context.make_tuple(builder, kind, uncounted)
        return value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return one(context, builder, signature.args[0], args[0])

    return value(value), codegen


@intrinsic
def hold(typing: Any, value: Any) -> Any:
    """Keep an array, or a tuple of them, alive up to here, so that a borrowed one may be used until then."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_dummy_value()

    return types.void(value), codegen


@intrinsic
def _float_of_bits(typing: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@njit(fastmath=MATH, nogil=True, cache=True)
def exp(x: np.float32) -> np.float32:
    """Compute e^x to float32 precision, 0 below -87, without a call, so that loops over it become vector
    instructions."""
    bounded = min(max(x, np.float32(-87.0)), np.float32(88.0))
    power = bounded * np.float32(1.4426950408889634)
    whole = np.floor(power + np.float32(0.5))
    part = power - whole  # within half of zero, where this polynomial is 2^part
    y = np.float32(1.5403530393381610e-4)
    y = y * part + np.float32(1.3333558146428443e-3)
    y = y * part + np.float32(9.6181291076284772e-3)
    y = y * part + np.float32(5.5504108664821580e-2)
    y = y * part + np.float32(2.4022650695910071e-1)
    y = y * part + np.float32(6.9314718055994531e-1)
    y = y * part + np.float32(1.0)
    y *= _float_of_bits((np.int32(whole) + np.int32(127)) << np.int32(23))
    return y if x > np.float32(-87.0) else np.float32(0.0)
