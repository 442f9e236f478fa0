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

from model_worker.cpu.simd.cache_dot import PANEL_GROUPS
from model_worker.cpu.simd.dot_bf16 import INDEX, LANES, WORD, WORDS, splat, sums_at
from model_worker.cpu.simd.vectors import constant, larger, load_lanes, power_of_two, store_lanes

# Its stub gives what it decorates the wrong signature.
intrinsic: Any = numba.extending.intrinsic

LOG2_E = 1.4426950408889634
# The peak of a row that has seen no key.
LOWEST = -1e30
# Excess of a score over the peak up to which the peak stays, so that it seldom rises after a row's first panel.
_SLACK = 8.0
# Arguments of `soften`.
_PLAIN_ARGUMENTS = 8


def _over_lanes(builder: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Combine all lanes of a vector."""
    distance = LANES // 2
    while distance:
        mask = ir.Constant(WORDS, [(lane + distance) % LANES for lane in range(LANES)])
        vector = combine(builder, vector, builder.shuffle_vector(vector, vector, mask))
        distance //= 2
    return builder.extract_element(vector, ir.Constant(WORD, 0))


def _seen(builder: Any, begin: Any, end: Any) -> list[Any]:
    """Return for each vector of a panel's keys which of them are among `begin` to `end`."""
    # A key is if its number less `begin`, as a number without a sign, is below their count.
    first = builder.trunc(begin, WORD)
    count = builder.trunc(builder.sub(end, begin), WORD)
    masks = []
    for v in range(PANEL_GROUPS):
        numbers = ir.Constant(WORDS, [v * LANES + lane for lane in range(LANES)])
        masks.append(builder.icmp_unsigned("<", builder.sub(numbers, splat(builder, first)), splat(builder, count)))
    return masks


def _raise_peak(builder: Any, highest: Any, peak_place: Any, totals_place: Any) -> Any:
    """Raise the peak where a lane of `highest` is far above it, and shrink the totals. Returns the shrink factor, or
    1."""
    before = builder.load(peak_place)
    entry = builder.block
    limit = splat(builder, builder.fadd(before, ir.Constant(before.type, _SLACK)))
    above = builder.bitcast(builder.fcmp_ordered(">", highest, limit), ir.IntType(LANES))
    with builder.if_then(builder.icmp_unsigned("!=", above, ir.Constant(above.type, 0)), likely=False):
        peak = _over_lanes(builder, highest, larger)
        fall = power_of_two(builder, splat(builder, builder.fsub(before, peak)))
        builder.store(peak, peak_place)
        builder.store(builder.fmul(builder.load(totals_place, align=4), fall), totals_place, align=4)
        raised = builder.block
        fallen = builder.extract_element(fall, ir.Constant(WORD, 0))
    shrink = builder.phi(before.type)
    shrink.add_incoming(ir.Constant(before.type, 1.0), entry)
    shrink.add_incoming(fallen, raised)
    return shrink


def _powers(builder: Any, scaled: list[Any], seen: list[Any], peak_place: Any, totals_place: Any) -> list[Any]:
    """Return the weights of a row's scores, and the factor by which earlier results shrink. An empty `seen` means
    all."""
    known = (
        [builder.select(mask, x, constant(LOWEST)) for mask, x in zip(seen, scaled, strict=True)] if seen else scaled
    )
    highest = larger(builder, larger(builder, *known[:2]), larger(builder, *known[2:]))
    shrink = _raise_peak(builder, highest, peak_place, totals_place)
    top = splat(builder, builder.load(peak_place))
    powers = [power_of_two(builder, builder.fsub(x, top)) for x in scaled]
    if seen:
        powers = [builder.select(mask, power, constant(0.0)) for mask, power in zip(seen, powers, strict=True)]
    return [*powers, shrink]


def _emit_soften(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Emit `soften`, or `soften_scaled` where there are scales."""
    kinds = signature.args
    nothing = ir.Constant(INDEX, 0)
    every = ir.Constant(INDEX, LANES * PANEL_GROUPS)
    places = sums_at(context, builder, kinds[0], args[0], args[1], nothing, 1, PANEL_GROUPS)
    scaled = [builder.fmul(builder.load(place, align=4), splat(builder, args[4])) for place in places]
    of_values = []
    if len(args) > _PLAIN_ARGUMENTS:
        of_keys, of_values = (_scales(context, builder, kinds[i], args[i]) for i in range(_PLAIN_ARGUMENTS, len(args)))
        scaled = [builder.fmul(score, factor) for score, factor in zip(scaled, of_keys, strict=True)]
    peak_place = builder.gep(context.make_array(kinds[6])(context, builder, args[6]).data, [args[1]])
    totals_place = sums_at(context, builder, kinds[7], args[7], args[1], nothing, 1, 1)[0]
    whole = builder.and_(builder.icmp_signed("<=", args[2], nothing), builder.icmp_signed(">=", args[3], every))
    ways = []
    masks = _seen(builder, args[2], args[3])
    with builder.if_else(whole, likely=True) as branches:
        for branch, seen in zip(branches, ([], masks), strict=True):
            with branch:
                made = _powers(builder, scaled, seen, peak_place, totals_place)
                ways.append((made, builder.block))
    *powers, shrink = (builder.phi(value.type) for value in ways[0][0])
    for made, block in ways:
        for phi, value in zip((*powers, shrink), made, strict=True):
            phi.add_incoming(value, block)
    array = context.make_array(kinds[5])(context, builder, args[5])
    line = builder.gep(array.data, [builder.mul(args[1], builder.extract_value(array.shape, 1))])
    written = powers
    if of_values:
        # Scales of keys that are not there may be no numbers.
        products = [builder.fmul(power, factor) for power, factor in zip(powers, of_values, strict=True)]
        written = [builder.select(mask, value, constant(0.0)) for mask, value in zip(masks, products, strict=True)]
    for v, power in enumerate(written):
        store_lanes(builder, power, builder.gep(line, [ir.Constant(INDEX, v * LANES)]), kinds[5].dtype)
    added = builder.fadd(builder.fadd(powers[0], powers[1]), builder.fadd(powers[2], powers[3]))
    builder.store(builder.fadd(builder.load(totals_place, align=4), added), totals_place, align=4)
    return shrink


def _scales(context: Any, builder: Any, kind: Any, value: Any) -> list[Any]:
    """Load the scales of a panel's keys, float32 [64]."""
    data = context.make_array(kind)(context, builder, value).data
    return [load_lanes(builder, builder.gep(data, [ir.Constant(INDEX, v * LANES)])) for v in range(PANEL_GROUPS)]


_NUMBERS = (types.int64, types.int64, types.int64, types.float32)


@intrinsic
def soften(
    typing: Any, scores: Any, row: Any, begin: Any, end: Any, scale: Any, weights: Any, peak: Any, totals: Any
) -> Any:
    """Write weights[row] = 2^(scale * scores[row] - peak[row]) for keys begin to end of a panel, and 0 for the others.

    `peak` f32[rows] is about the highest scaled score so far: weights may be as large as 2^_SLACK, so that it seldom
    has to rise. `totals` f32[rows, LANES] add up to the sum of weights. Returns the factor by which earlier results
    shrink because the peak has risen. `scores` f32[rows, 64], `weights` likewise, or bfloat16's bits.
    """
    return types.float32(scores, *_NUMBERS, weights, peak, totals), _emit_soften


@intrinsic
def soften_scaled(
    typing: Any,
    scores: Any,
    row: Any,
    begin: Any,
    end: Any,
    scale: Any,
    weights: Any,
    peak: Any,
    totals: Any,
    of_keys: Any,
    of_values: Any,
) -> Any:
    """Soften the scores of keys in codes: each has a scale, f32[64], and a value in codes, by whose scale its weight is
    multiplied where it is written."""
    return types.float32(scores, *_NUMBERS, weights, peak, totals, of_keys, of_values), _emit_soften
