"""compressed-tensors: packed integers with groups, int8 and FP8 numbers with scales, and the floats of 4 and 6 bits.

Which of them a weight is shows in the names and types of its tensors; config.json says bits and blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

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
from model_worker.loading.quantized.grouped import GroupedWeight, Parts
from model_worker.loading.quantized.scaled import FP8, ScaledWeight, scales_of
from model_worker.loading.quantized.scheme import Scheme
from model_worker.loading.quantized.small_floats import FloatWeight
from model_worker.loading.stored import Pool, Stored

# Formats of config.json that are read here.
FORMATS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)


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


def check_compressed(scheme: Scheme) -> None:
    """Refuse what config.json names and this file does not read. ValueError names field and value."""
    for field in ("format", *(f"config_groups.{name}.format" for name in scheme.get("config_groups", {}))):
        value: Any = scheme.fields
        for part in field.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value not in FORMATS:
            raise ValueError(
                f"{scheme.file} names the format {value!r} ({field}) of compressed-tensors; readable are "
                f"{', '.join(FORMATS)}"
            )
    transforms = scheme.get("transform_config", {})
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise ValueError(
            f"{scheme.file} has a transform_config: its activations must be rotated before each product, and they are "
            "not rotated here"
        )
    sparsity = scheme.get("sparsity_config", {})
    kind = sparsity.get("format") if isinstance(sparsity, Mapping) else None
    if kind not in (None, "dense"):
        raise ValueError(f"{scheme.file} names the sparsity_config {kind!r}; only dense weights can be read here")


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
    outputs, inputs = (int(size) for size in sizes.read().tolist())
    bits = _bits(codes, inputs, scheme)
    count = 1 if _is_one(scales) else scales.shape[-1]
    if codes.shape[:-1] != (outputs,) or not (_is_one(scales) or scales.shape == (outputs, count)):
        raise ValueError(
            f"{codes.name} {list(codes.shape)} and {scales.name} {list(scales.shape)} do not fit its shape "
            f"{[outputs, inputs]}"
        )
    check_scales(scales)
    zeros = pool.take_if(f"{target}_zero_point")
    if zeros is not None:
        rows = -(-outputs * bits // WORD_BITS) if zeros.dtype == "I32" else outputs
        if zeros.shape != (rows, count) and not (_is_one(scales) and _is_one(zeros)):
            raise ValueError(f"{zeros.name} has shape {list(zeros.shape)} and should have {[rows, count]}")
    order = pool.take_if(f"{target}_g_idx")
    groups = None if order is None else _groups(order, inputs, count)
    if groups is None:
        groups = group_width(codes.name, inputs, count, _group_sizes(scheme))
    return PackedWeight(codes, (outputs, inputs), bits, scales, zeros, groups)


def _bits(codes: Stored, inputs: int, scheme: Scheme) -> int:
    """Return the bits of each number, which the width of their words and config.json agree on."""
    named = {int(weights.get("num_bits", 0)) for weights in _weights(scheme)}
    fitting = [bits for bits in range(1, BYTE_BITS + 1) if -(-inputs * bits // WORD_BITS) == codes.shape[-1]]
    found = [bits for bits in fitting if not named or bits in named]
    if len(found) != 1:
        raise ValueError(
            f"{codes.name} {list(codes.shape)} has {' or '.join(map(str, fitting)) or 'no whole number of'} bits for "
            f"each of {inputs} inputs, and {scheme.file} says num_bits {sorted(named)}"
        )
    return found[0]


def _groups(order: Stored, inputs: int, groups: int) -> Tensor | int | None:
    """Return the group of each input, or how many neighbours share one; None where the file has no order, only -1."""
    if order.shape != (inputs,):
        raise ValueError(f"{order.name} has shape {list(order.shape)} and should have {[inputs]}")
    found = order.read().long()
    if int(found.min()) < 0:
        return None
    if int(found.max()) >= groups:
        raise ValueError(f"{order.name} names group {int(found.max())}; there are {groups}")
    return width_of(found) or found


def _group_sizes(scheme: Scheme) -> list[int]:
    """Return the sizes of groups that config.json names; -1 for groups of all inputs."""
    sizes = {
        int(weights.get("group_size") or -1)
        for weights in _weights(scheme)
        if weights.get("group_size") or weights.get("strategy") in ("channel", "tensor")
    }
    return sorted(sizes, reverse=True)


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
    sides = {tuple(w["block_structure"]) for w in _weights(scheme) if isinstance(w.get("block_structure"), list)}
    scales, block = scales_of(pool.take(f"{weight.name}_scale"), weight, sides.pop() if len(sides) == 1 else None)
    zeros = pool.take_if(f"{weight.name}_zero_point")
    values = None if zeros is None else zeros.read().float()
    if values is not None:
        values = values.reshape(1, 1) if values.numel() == 1 else values.reshape(scales.shape)
    return ScaledWeight(pool.take(weight.name), scales, values, block)


def _weights(scheme: Scheme) -> Iterator[Mapping[str, Any]]:
    groups = scheme.get("config_groups", {})
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield weights
