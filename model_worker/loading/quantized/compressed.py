"""compressed-tensors: packed integers with groups, int8 and FP8 numbers with scales, and the 4-bit floats.

Which of them a weight is shows in the names and types of its tensors; config.json says bits and blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.loading.quantized.bits import (
    BITS,
    WORD_BITS,
    check_scales,
    check_words,
    group_width,
    unpack,
    width_of,
)
from model_worker.loading.quantized.float4 import Float4Weight
from model_worker.loading.quantized.grouped import GroupedWeight, Parts
from model_worker.loading.quantized.scaled import FP8, ScaledWeight, scales_of
from model_worker.loading.quantized.scheme import Scheme
from model_worker.loading.stored import Pool, Stored

# Formats of config.json that are read here.
FORMATS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)


class PackedWeight(GroupedWeight):
    """A weight [out, in] of i32 [out, in * bits / 32] (codes less 2^(bits - 1)), scales [out, groups], zeros, and the
    group of each input, or how many neighbours share one."""

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
        return Parts(codes, zeros, self._scales[first:last])

    def _zeros_of(self, stored: Stored, first: int, last: int, middle: int) -> Tensor:
        if stored.dtype != "I32":
            return stored[first:last].to(torch.int16) + middle
        per_word = WORD_BITS // self._bits
        words = stored[first // per_word : -(-last // per_word)]
        return unpack(words.t(), self._bits)[:, : last - first].t().to(torch.int16)


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
                found[target] = _float4(pool, target)
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
    bits = codes.shape[1] * WORD_BITS // max(1, inputs)
    named = {int(weights.get("num_bits", 0)) for weights in _weights(scheme)}
    if bits not in BITS or (named and bits not in named):
        raise ValueError(
            f"{codes.name} has {bits} bits for each weight; {', '.join(map(str, BITS))} can be read here, and "
            f"{scheme.file} says num_bits {sorted(named)}"
        )
    if codes.shape != (outputs, -(-inputs * bits // WORD_BITS)) or scales.shape[:-1] != (outputs,):
        raise ValueError(
            f"{codes.name} {list(codes.shape)} and {scales.name} {list(scales.shape)} do not fit its shape "
            f"{[outputs, inputs]}"
        )
    check_scales(scales)
    zeros = pool.take_if(f"{target}_zero_point")
    if zeros is not None:
        rows = -(-outputs * bits // WORD_BITS) if zeros.dtype == "I32" else outputs
        if zeros.shape != (rows, scales.shape[1]):
            raise ValueError(f"{zeros.name} has shape {list(zeros.shape)} and should have {[rows, scales.shape[1]]}")
    order = pool.take_if(f"{target}_g_idx")
    groups = None if order is None else _groups(order, inputs, scales.shape[1])
    if groups is None:
        groups = group_width(codes.name, inputs, scales.shape[1], _group_sizes(scheme))
    return PackedWeight(codes, (outputs, inputs), bits, scales, zeros, groups)


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
        if weights.get("group_size") or weights.get("strategy") == "channel"
    }
    return sorted(sizes, reverse=True)


def _float4(pool: Pool, target: str) -> EncodedWeight:
    codes = pool.take(f"{target}_packed")
    scales = pool.take_if(f"{target}_scale")
    if scales is None:
        raise ValueError(f"{codes.name} has no weight_scale beside it")
    whole = pool.take_if(f"{target}_global_scale")
    if whole is None:
        return Float4Weight(codes, scales, 1.0)
    check_scales(whole)
    return Float4Weight(codes, scales, 1.0 / float(whole.read().float().max()))


def _scaled(pool: Pool, weight: Stored, scheme: Scheme) -> EncodedWeight:
    if len(weight.shape) != 2:
        raise ValueError(f"{weight.name} has shape {list(weight.shape)}; only matrices of compressed-tensors are read")
    sides = {tuple(w["block_structure"]) for w in _weights(scheme) if isinstance(w.get("block_structure"), list)}
    scales, block = scales_of(pool.take(f"{weight.name}_scale"), weight, sides.pop() if len(sides) == 1 else None)
    zeros = pool.take_if(f"{weight.name}_zero_point")
    values = None if zeros is None else zeros.read().float()
    if values is not None:
        values = values.reshape(1, 1) if values.numel() == 1 else values.reshape(scales.shape)
        values = None if not bool(values.any()) else values
    return ScaledWeight(pool.take(weight.name), scales, values, block)


def _weights(scheme: Scheme) -> Iterator[Mapping[str, Any]]:
    groups = scheme.get("config_groups", {})
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield weights
