"""compressed-tensors: packed integers with groups, int8 and FP8 numbers with scales, and the floats of 4 and 6 bits.

Which of them a weight is shows in the names and types of its tensors; config.json says bits and blocks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.loading.quantized.bits import (
    BYTE_BITS,
    WORD_BITS,
    check_scales,
    check_words,
    group_width,
    unpack,
    width_of,
)
from model_worker.loading.quantized.compressed_config import Arguments, arguments_for
from model_worker.loading.quantized.grouped import GroupedWeight, Parts
from model_worker.loading.quantized.scaled import FP8, ScaledWeight, scales_of
from model_worker.loading.quantized.scheme import Scheme
from model_worker.loading.quantized.small_floats import FloatWeight
from model_worker.loading.stored import Pool, Stored


class PackedWeight(GroupedWeight):
    """A weight [out, in] of i32 [out, in * bits / 32] (codes less 2^(bits - 1)), scales [out, groups] or one of all,
    zeros, and the group of each input, or how many neighbours share one."""

    def __init__(
        self,
        codes: Stored,
        shape: tuple[int, int],
        bits: int,
        scales: Stored,
        zeros: Stored | None,
        groups: Tensor | int,
    ) -> None:
        super().__init__(shape, bits, groups)
        self._codes = codes
        self._scales = scales
        self._zeros = zeros

    def parts(self, first: int, last: int) -> Parts:
        codes = unpack(self._codes[first:last], self._bits)[:, : self.shape[1]]
        middle = 1 << (self._bits - 1)
        zeros = middle if self._zeros is None else self._zeros_of(self._zeros, first, last, middle)
        return Parts(codes, zeros, _of_outputs(self._scales, first, last))

    def _zeros_of(self, stored: Stored, first: int, last: int, middle: int) -> Tensor:
        if stored.dtype != "I32":
            return _of_outputs(stored, first, last).to(torch.int16) + middle
        words = stored[first * self._bits // WORD_BITS : -(-last * self._bits // WORD_BITS)]
        return unpack(words.t(), self._bits)[:, : last - first].t().to(torch.int16)


def _of_outputs(stored: Stored, first: int, last: int) -> Tensor:
    """Read the numbers of some outputs, [last - first, groups]."""
    return stored.read().reshape(1, 1).expand(last - first, 1) if _is_one(stored) else stored[first:last]


def _is_one(stored: Stored) -> bool:
    """Whether a tensor has one number for all outputs."""
    return math.prod(stored.shape) == 1


def take_compressed(pool: Pool, scheme: Scheme) -> dict[str, EncodedWeight]:
    """Take the weights of these formats. ValueError says what in them cannot be read."""
    found: dict[str, EncodedWeight] = {}
    for name in pool:
        weight = pool.peek(name)
        if weight is None:
            continue
        if name.endswith("weight_packed"):
            target = name.removesuffix("_packed")
            if weight.dtype == "U8":
                found[target] = _small_float(pool, target)
            else:
                found[target] = _packed(pool, target, scheme)
        elif weight.dtype in ("I8", *FP8) and f"{name}_scale" in pool:
            found[name] = _scaled(pool, weight, scheme)
    return found


def _packed(pool: Pool, target: str, scheme: Scheme) -> EncodedWeight:
    codes = pool.take(f"{target}_packed")
    sizes = pool.take_if(f"{target}_shape")
    scales = pool.take_if(f"{target}_scale")
    if sizes is None or scales is None:
        raise ValueError(f"{codes.name} has no {'weight_shape' if sizes is None else 'weight_scale'} beside it")
    check_words(codes)
    outputs, inputs = _shape(sizes)
    said = arguments_for(scheme, target)
    bits = _bits(codes, inputs, said)
    said = [one for one in said if one.bits == bits]
    count = 1 if _is_one(scales) else scales.shape[-1]
    if codes.shape[:-1] != (outputs,) or not (_is_one(scales) or scales.shape == (outputs, count)):
        raise ValueError(
            f"{codes.name} {list(codes.shape)} and {scales.name} {list(scales.shape)} do not fit its shape "
            f"{[outputs, inputs]}"
        )
    check_scales(scales)
    zeros = pool.take_if(f"{target}_zero_point")
    if zeros is not None:
        _check_zeros(zeros, (outputs, count), bits, scales)
    elif said and all(one.has_zeros for one in said):
        raise _lacks(codes, "weight_zero_point", said[0], "symmetric false")
    order = pool.take_if(f"{target}_g_idx")
    if order is None and count > 1 and said and all(one.is_ordered for one in said):
        raise _lacks(codes, "weight_g_idx", said[0], f"actorder {said[0].fields['actorder']!r}")
    groups = None if order is None else _groups(order, inputs, count)
    if groups is None:
        groups = group_width(codes.name, inputs, count, _group_sizes(said))
    return PackedWeight(codes, (outputs, inputs), bits, scales, zeros, groups)


def _lacks(codes: Stored, part: str, said: Arguments, why: str) -> ValueError:
    return ValueError(
        f"{codes.name} has no {part} beside it, and {said.file} has {why} ({said.path}), so that its values are "
        "unknown: download the files anew"
    )


def _shape(sizes: Stored) -> tuple[int, int]:
    """Read the shape of a weight that is packed."""
    found = sizes.read().flatten().tolist()
    if len(found) != 2 or any(int(size) != size or size < 1 for size in found):
        raise ValueError(
            f"{sizes.name} is {found}; it must be the outputs and inputs of the weight, two whole numbers of at least "
            "1: download the file anew"
        )
    return int(found[0]), int(found[1])


def _check_zeros(zeros: Stored, shape: tuple[int, int], bits: int, scales: Stored) -> None:
    """ValueError for zeros that are neither packed along outputs nor bytes for each scale, or that the bits lack."""
    outputs, groups = shape
    if zeros.dtype == "I32":
        rows = -(-outputs * bits // WORD_BITS)
        if zeros.shape != (rows, groups):
            raise ValueError(
                f"{zeros.name} has shape {list(zeros.shape)} and should have {[rows, groups]}, since I32 are packed "
                "zeros of outputs: download the file anew"
            )
        return
    if zeros.dtype != "I8":
        raise ValueError(f"{zeros.name} is {zeros.dtype}; zeros are read from I8 and, packed, I32: download it anew")
    if zeros.shape != shape and not (_is_one(scales) and _is_one(zeros)):
        raise ValueError(f"{zeros.name} has shape {list(zeros.shape)} and should have {list(shape)}")
    values = zeros.read()
    least, most = int(values.min()), int(values.max())
    middle = 1 << (bits - 1)
    if least < -middle or most > middle:
        raise ValueError(
            f"{zeros.name} has the zero {least if least < -middle else most}; those of {bits} bits are from {-middle} "
            f"to {middle}: download the file anew"
        )


def _bits(codes: Stored, inputs: int, said: list[Arguments]) -> int:
    """Return the bits of each number, which the width of their words and config.json agree on."""
    named = {one.bits for one in said}
    fitting = [bits for bits in range(1, BYTE_BITS + 1) if -(-inputs * bits // WORD_BITS) == codes.shape[-1]]
    found = [bits for bits in fitting if not named or bits in named]
    if len(found) != 1:
        raise ValueError(
            f"{codes.name} {list(codes.shape)} has {' or '.join(map(str, fitting)) or 'no whole number of'} bits for "
            f"each of {inputs} inputs, and its config says num_bits {sorted(named)}"
        )
    return found[0]


def _groups(order: Stored, inputs: int, groups: int) -> Tensor | int | None:
    """Return the group of each input, or how many neighbours share one; None where the file has no order, only -1."""
    if order.shape != (inputs,):
        raise ValueError(f"{order.name} has shape {list(order.shape)} and should have {[inputs]}")
    found = order.read().long()
    if bool((found == -1).all()):
        return None
    least, most = int(found.min()), int(found.max())
    if least < 0 or most >= groups:
        raise ValueError(
            f"{order.name} names group {least if least < 0 else most}; there are {groups}: download the file anew"
        )
    return width_of(found) or found


def _group_sizes(said: list[Arguments]) -> list[int]:
    """Return the sizes of groups that config.json names; -1 for groups of all inputs."""
    return sorted({size for one in said if (size := one.group_size) is not None}, reverse=True)


def _small_float(pool: Pool, target: str) -> EncodedWeight:
    codes = pool.take(f"{target}_packed")
    scales = pool.take_if(f"{target}_scale")
    if scales is None:
        raise ValueError(f"{codes.name} has no weight_scale beside it")
    whole = pool.take_if(f"{target}_global_scale")
    if whole is None and scales.dtype in FP8:
        raise ValueError(
            f"{codes.name} is NVFP4 and has no weight_global_scale beside it, so its values are unknown: download the "
            "files anew"
        )
    if whole is None:
        return FloatWeight(codes, scales, 1.0)
    check_scales(whole)
    return FloatWeight(codes, scales, 1.0 / float(whole.read().float().max()))


def _scaled(pool: Pool, weight: Stored, scheme: Scheme) -> EncodedWeight:
    if len(weight.shape) != 2:
        raise ValueError(f"{weight.name} has shape {list(weight.shape)}; only matrices of compressed-tensors are read")
    said = arguments_for(scheme, weight.name)
    sides = {one.block for one in said} - {None}
    scales, block = scales_of(pool.take(f"{weight.name}_scale"), weight, sides.pop() if len(sides) == 1 else None)
    zeros = pool.take_if(f"{weight.name}_zero_point")
    if zeros is None and weight.dtype == "I8" and said and all(one.has_zeros for one in said):
        raise _lacks(weight, "weight_zero_point", said[0], "symmetric false")
    values = None if zeros is None else zeros.read().float()
    if values is not None:
        values = values.reshape(1, 1) if values.numel() == 1 else values.reshape(scales.shape)
    if block is None and scales.shape[1] > 1:
        _check_order(pool, weight, scales.shape[1], said)
    return ScaledWeight(pool.take(weight.name), scales, values, block)


def _check_order(pool: Pool, weight: Stored, groups: int, said: list[Arguments]) -> None:
    """ValueError where the groups of a weight that is not packed are no neighbours, or may be none."""
    order = pool.take_if(f"{weight.name}_g_idx")
    if order is None:
        if said and all(one.is_ordered for one in said):
            raise _lacks(weight, "weight_g_idx", said[0], f"actorder {said[0].fields['actorder']!r}")
        return
    found = _groups(order, weight.shape[1], groups)
    if isinstance(found, Tensor) or found not in (None, weight.shape[1] // groups):
        raise ValueError(
            f"{order.name} has the inputs of {weight.name} in an order of their own, in which only packed weights are "
            "read: take a checkpoint of pack-quantized"
        )
