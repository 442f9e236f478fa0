"""Numbers of groups, as a file has them, to float32 for dot_codes.py: of 32 outputs and as many units as there are.

A unit is a group of inputs, or half of one. Knows LLVM only.
"""

from __future__ import annotations

from typing import Any

import numba.core.cgutils
import numba.extending
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from model_worker.cpu.simd.code_groups import HALF_LANES, index
from model_worker.cpu.simd.dot_bf16 import FEATURES, FLOATS, LANES, WORDS

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic

_VECTORS = HALF_LANES // LANES
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_CONVERTS_HALVES: bool = FEATURES.get("f16c", False)
_FLOAT_BYTES = 4
_HALF_BYTES = 2


def _load(builder: Any, address: Any, kind: Any, vector: int) -> Any:
    """Load one of the vectors of a row of numbers at this address."""
    place = builder.inttoptr(address, kind.as_pointer())
    return builder.load(builder.gep(place, [index(vector)]), align=1)


def _widened(builder: Any, halves: Any) -> Any:
    """Convert finite float16s, given their bits, to float32."""
    if _CONVERTS_HALVES:
        return builder.fpext(builder.bitcast(halves, _HALVES), FLOATS)

    def every(value: int) -> Any:
        return ir.Constant(WORDS, [value] * LANES)

    bits = builder.zext(halves, WORDS)
    magnitude = builder.shl(builder.and_(bits, every(0x7FFF)), every(13))
    # Both have subnormals: the difference of their exponents' offsets is a factor.
    value = builder.fmul(builder.bitcast(magnitude, FLOATS), ir.Constant(FLOATS, [2.0**112] * LANES))
    sign = builder.shl(builder.and_(bits, every(0x8000)), every(16))
    return builder.bitcast(builder.or_(builder.bitcast(value, WORDS), sign), FLOATS)


def _numbers(builder: Any, place: Any, row: Any, wide: Any) -> list[Any]:
    """Load a row of float32, or of float16, as float32."""
    narrow = builder.icmp_signed("==", wide, index(0))
    size = builder.select(narrow, index(_HALF_BYTES * HALF_LANES), index(_FLOAT_BYTES * HALF_LANES))
    address = builder.add(place, builder.mul(row, size))
    with builder.if_else(narrow) as (then, otherwise):
        with then:
            halves = [_widened(builder, _load(builder, address, _SHORTS, v)) for v in range(_VECTORS)]
            from_halves = builder.block
        with otherwise:
            floats = [_load(builder, address, FLOATS, v) for v in range(_VECTORS)]
            from_floats = builder.block
    found = []
    for half, whole in zip(halves, floats, strict=True):
        phi = builder.phi(FLOATS)
        phi.add_incoming(half, from_halves)
        phi.add_incoming(whole, from_floats)
        found.append(phi)
    return found


def _store(builder: Any, out: Any, row: Any, values: list[Any]) -> None:
    address = builder.add(out, builder.mul(row, index(_FLOAT_BYTES * HALF_LANES)))
    for v, value in enumerate(values):
        place = builder.inttoptr(address, FLOATS.as_pointer())
        builder.store(value, builder.gep(place, [index(v)]), align=4)


@intrinsic
def expand_numbers(typing: Any, place: Any, wide: Any, count: Any, ratio: Any, steps: Any, out: Any) -> Any:
    """Write float32 out[number * ratio + i, lane] = base[number, lane] * steps[number * ratio + i, lane].

    All are addresses: `place` of float32 [count, outputs] if `wide`, else of float16; `steps` of int8, or 0 for none.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place, wide, count, ratio, steps, out = args
        has_steps = builder.icmp_signed("!=", steps, index(0))
        with numba.core.cgutils.for_range(builder, count) as number:
            base = _numbers(builder, place, number.index, wide)
            first = builder.mul(number.index, ratio)
            with builder.if_else(has_steps) as (then, otherwise):
                with then, numba.core.cgutils.for_range(builder, ratio) as unit:
                    row = builder.add(first, unit.index)
                    address = builder.add(steps, builder.mul(row, index(HALF_LANES)))
                    of_unit = [_load(builder, address, _BYTES, v) for v in range(_VECTORS)]
                    scaled = [
                        builder.fmul(value, builder.sitofp(builder.sext(step, WORDS), FLOATS))
                        for value, step in zip(base, of_unit, strict=True)
                    ]
                    _store(builder, out, row, scaled)
                with otherwise, numba.core.cgutils.for_range(builder, ratio) as unit:
                    _store(builder, out, builder.add(first, unit.index), base)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6), codegen


@intrinsic
def expand_zeros(typing: Any, zeros: Any, count: Any, ratio: Any, scales: Any, out: Any) -> Any:
    """Write float32 out[number * ratio + i, lane] = -zeros[number, lane] * scales[number * ratio + i, lane].

    All are addresses: `zeros` of uint8 [count, outputs], `scales` as `expand_numbers` has written them.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zeros, count, ratio, scales, out = args
        with numba.core.cgutils.for_range(builder, count) as number:
            address = builder.add(zeros, builder.mul(number.index, index(HALF_LANES)))
            loaded = [_load(builder, address, _BYTES, v) for v in range(_VECTORS)]
            nothing = ir.Constant(FLOATS, [0.0] * LANES)
            negative = [builder.fsub(nothing, builder.uitofp(builder.zext(zero, WORDS), FLOATS)) for zero in loaded]
            first = builder.mul(number.index, ratio)
            with numba.core.cgutils.for_range(builder, ratio) as unit:
                row = builder.add(first, unit.index)
                address = builder.add(scales, builder.mul(row, index(_FLOAT_BYTES * HALF_LANES)))
                of_unit = [_load(builder, address, FLOATS, v) for v in range(_VECTORS)]
                _store(
                    builder,
                    out,
                    row,
                    [builder.fmul(zero, scale) for zero, scale in zip(negative, of_unit, strict=True)],
                )
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), codegen
