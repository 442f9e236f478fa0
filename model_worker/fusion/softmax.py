"""The softmax between the two products of attention: a row's scores of one panel of keys become weights.

Written for vector registers, because between two products that run at the speed of arithmetic, loops over a row took
as long as they: a panel's scores stay in four registers from the scale to the rounded weights. Powers are of two, so
the scale holds a factor of log2(e). Knows LLVM; knows no sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba.extending
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from model_worker.fusion.cache_tile import PANEL_GROUPS
from model_worker.fusion.tile import FLOATS, HAS_BF16_DOT, INDEX, LANES, WORD, WORDS, BFloat, splat, sums_at

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic

LOG2_E = 1.4426950408889634
LOWEST = -1e30
"""The peak of a row that has seen no key."""
_FLOAT = ir.FloatType()
# 2^x for x within half of zero, to a relative error of 2e-7: least squares of the relative error at Chebyshev's points.
_POWERS = (1.0, 0.693146884, 0.24022238, 0.0555089302, 0.00967169832, 0.00132186722)
# Below, a weight is 0 but for what float32 cannot hold.
_LEAST_POWER = -126.0


def _constant(value: float) -> Any:
    return ir.Constant(FLOATS, [value] * LANES)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _call(builder: Any, name: str, *operands: Any) -> Any:
    kind = ir.FunctionType(FLOATS, (FLOATS,) * len(operands))
    return builder.call(builder.module.declare_intrinsic(f"{name}.v16f32", (), kind), operands)


def _power_of_two(builder: Any, x: Any) -> Any:
    """2^x for x up to 0, and no number for what is none."""
    least = _constant(_LEAST_POWER)
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    whole = _call(builder, "llvm.nearbyint", x)
    part = builder.fsub(x, whole)
    y = _constant(_POWERS[-1])
    for coefficient in _POWERS[-2::-1]:
        y = _call(builder, "llvm.fmuladd", y, part, _constant(coefficient))
    exponent = builder.shl(builder.fptosi(whole, WORDS), ir.Constant(WORDS, [23] * LANES))
    return builder.bitcast(builder.add(builder.bitcast(y, WORDS), exponent), FLOATS)


def _over_lanes(builder: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """All lanes of a vector combined."""
    distance = LANES // 2
    while distance:
        mask = ir.Constant(WORDS, [(lane + distance) % LANES for lane in range(LANES)])
        vector = combine(builder, vector, builder.shuffle_vector(vector, vector, mask))
        distance //= 2
    return builder.extract_element(vector, ir.Constant(WORD, 0))


def _add(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


def _store_bfloat16(builder: Any, vector: Any, place: Any) -> None:
    """The nearest bfloat16, even among two."""
    halves = ir.VectorType(ir.IntType(16), LANES)
    if HAS_BF16_DOT:
        kind = ir.FunctionType(ir.VectorType(BFloat(), LANES), (FLOATS,))
        convert = builder.module.declare_intrinsic("llvm.x86.avx512bf16.cvtneps2bf16.512", (), kind)
        rounded = builder.bitcast(builder.call(convert, (vector,)), halves)
    else:
        bits, sixteen = builder.bitcast(vector, WORDS), ir.Constant(WORDS, [16] * LANES)
        odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(WORDS, [1] * LANES))
        up = builder.add(bits, builder.add(odd, ir.Constant(WORDS, [0x7FFF] * LANES)))
        rounded = builder.trunc(builder.lshr(up, sixteen), halves)
    builder.store(rounded, builder.bitcast(place, halves.as_pointer()), align=2)


@intrinsic
def soften(
    typing: Any, scores: Any, row: Any, begin: Any, end: Any, scale: Any, weights: Any, peak: Any, total: Any
) -> Any:
    """weights[row] = 2^(scale * scores[row] - peak[row]) of keys begin to end of a panel, and 0 of the others.

    `peak` and `total` f32[rows] are the highest scaled score so far and the sum of weights; returns by how much earlier
    results shrink because the peak has risen. `scores` f32[rows, 64], `weights` likewise, or bfloat16's bits.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds, bfloat16 = signature.args, signature.args[5].dtype == types.uint16
        places = sums_at(context, builder, kinds[0], args[0], args[1], ir.Constant(INDEX, 0), 1, PANEL_GROUPS)
        scaled = [builder.fmul(builder.load(place, align=4), splat(builder, args[4])) for place in places]
        # A key is seen if its number less `begin`, as a number without a sign, is below their count.
        first, count = builder.trunc(args[2], WORD), builder.trunc(builder.sub(args[3], args[2]), WORD)
        seen = []
        for v in range(PANEL_GROUPS):
            numbers = ir.Constant(WORDS, [v * LANES + lane for lane in range(LANES)])
            seen.append(builder.icmp_unsigned("<", builder.sub(numbers, splat(builder, first)), splat(builder, count)))
        masked = [builder.select(mask, x, _constant(LOWEST)) for mask, x in zip(seen, scaled, strict=True)]
        pairs = [_larger(builder, masked[v], masked[v + 1]) for v in range(0, PANEL_GROUPS, 2)]
        here = _over_lanes(builder, _larger(builder, *pairs), _larger)
        peak_place, total_place = (
            builder.gep(context.make_array(kinds[i])(context, builder, args[i]).data, [args[1]]) for i in (6, 7)
        )
        before = builder.load(peak_place)
        highest = _larger(builder, before, here)
        top = splat(builder, highest)
        powers = [
            builder.select(mask, _power_of_two(builder, builder.fsub(x, top)), _constant(0.0))
            for mask, x in zip(seen, scaled, strict=True)
        ]
        array = context.make_array(kinds[5])(context, builder, args[5])
        line = builder.gep(array.data, [builder.mul(args[1], builder.extract_value(array.shape, 1))])
        for v, power in enumerate(powers):
            place = builder.gep(line, [ir.Constant(INDEX, v * LANES)])
            if bfloat16:
                _store_bfloat16(builder, power, place)
            else:
                builder.store(power, builder.bitcast(place, FLOATS.as_pointer()), align=4)
        added = _over_lanes(
            builder, builder.fadd(builder.fadd(powers[0], powers[1]), builder.fadd(powers[2], powers[3])), _add
        )
        fall = _power_of_two(builder, splat(builder, builder.fsub(before, highest)))
        shrink = builder.extract_element(fall, ir.Constant(WORD, 0))
        builder.store(highest, peak_place)
        builder.store(builder.fadd(builder.fmul(builder.load(total_place), shrink), added), total_place)
        return shrink

    numbers = (types.int64, types.int64, types.int64, types.float32)
    return types.float32(scores, *numbers, weights, peak, total), codegen
