"""Sixteen float32 in a vector register: their powers of two, and their conversion to memory. Knows LLVM only."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from model_worker.cpu.simd.dot_bf16 import FLOATS, HAS_BF16_DOT, LANES, WORDS, BFloat

# 2^x for x within half of zero, to a relative error of 2e-7: least squares of the relative error at Chebyshev's points.
_POWERS = (1.0, 0.693146884, 0.24022238, 0.0555089302, 0.00967169832, 0.00132186722)
# Below, a power is 0 but for what float32 cannot hold.
_LEAST_POWER = -126.0


def constant(value: float) -> Any:
    return ir.Constant(FLOATS, [value] * LANES)


def larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _call(builder: Any, name: str, *operands: Any) -> Any:
    kind = ir.FunctionType(FLOATS, (FLOATS,) * len(operands))
    return builder.call(builder.module.declare_intrinsic(f"{name}.v16f32", (), kind), operands)


def power_of_two(builder: Any, x: Any) -> Any:
    """Compute 2^x for x up to 127; NaN for a NaN."""
    least = constant(_LEAST_POWER)
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    whole = _call(builder, "llvm.nearbyint", x)
    part = builder.fsub(x, whole)
    y = constant(_POWERS[-1])
    for coefficient in _POWERS[-2::-1]:
        y = _call(builder, "llvm.fmuladd", y, part, constant(coefficient))
    exponent = builder.shl(builder.fptosi(whole, WORDS), ir.Constant(WORDS, [23] * LANES))
    return builder.bitcast(builder.add(builder.bitcast(y, WORDS), exponent), FLOATS)


def round_lanes(builder: Any, vector: Any) -> Any:
    """Return the bits of the nearest bfloat16 of sixteen float32, even among two."""
    halves = ir.VectorType(ir.IntType(16), LANES)
    if HAS_BF16_DOT:
        kind = ir.FunctionType(ir.VectorType(BFloat(), LANES), (FLOATS,))
        convert = builder.module.declare_intrinsic("llvm.x86.avx512bf16.cvtneps2bf16.512", (), kind)
        return builder.bitcast(builder.call(convert, (vector,)), halves)
    bits = builder.bitcast(vector, WORDS)
    sixteen = ir.Constant(WORDS, [16] * LANES)
    odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(WORDS, [1] * LANES))
    up = builder.add(bits, builder.add(odd, ir.Constant(WORDS, [0x7FFF] * LANES)))
    return builder.trunc(builder.lshr(up, sixteen), halves)


def store_lanes(builder: Any, vector: Any, place: Any, dtype: Any) -> None:
    """Store sixteen float32 as elements of an array, which may be bfloat16's bits."""
    if dtype == types.uint16:
        halves = ir.VectorType(ir.IntType(16), LANES)
        builder.store(round_lanes(builder, vector), builder.bitcast(place, halves.as_pointer()), align=2)
    else:
        builder.store(vector, builder.bitcast(place, FLOATS.as_pointer()), align=4)


def load_lanes(builder: Any, place: Any) -> Any:
    return builder.load(builder.bitcast(place, FLOATS.as_pointer()), align=4)
