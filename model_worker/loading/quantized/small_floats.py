"""Floats of 4 bits (E2M1) and of 6 (E2M3), one behind the other with the first low, whose groups have scales.

NVFP4 has groups of 16 with FP8 scales and one scale of the tensor, MXFP4 and MXFP6 groups of 32 with powers of two. The
experts of gpt-oss are MXFP4 in a layout of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.cpu.simd.dot_codes import GROUP_INPUTS
from model_worker.loading.quantized.bits import (
    BYTE_BITS,
    E2M1,
    E2M3,
    check_scales,
    nibbles,
    powers_of_two,
    spread,
    unpack,
)
from model_worker.loading.quantized.scheme import Scheme
from model_worker.loading.quantized.stored_weight import StoredWeight
from model_worker.loading.stored import Pool, Stored
from shared.weight_codes import Codes, Grouped

# Types of scales that are exponents of two.
_EXPONENTS = ("U8", "F8_E8M0")
_BITS = 4
_MX_GROUP = 32
_E2M1_DOUBLED = (2 * E2M1).numpy().astype(np.int8)


class _Float(NamedTuple):
    """A kind of floats: the value of each code, which is whole when it is multiplied."""

    bits: int
    values: Tensor
    factor: int

    @property
    def whole(self) -> NDArray[np.int8]:
        return (self.factor * self.values).numpy().astype(np.int8)


_KINDS = {4: _Float(4, E2M1, 2), 6: _Float(6, E2M3, 8)}


class FloatWeight(StoredWeight):
    """A weight [out, in] of u8 [out, in * bits / 8], scales [out, groups] in FP8 or as exponents, and one scale of
    all."""

    def __init__(self, codes: Stored, scales: Stored, scale: float) -> None:
        fits = len(codes.shape) == len(scales.shape) == 2 and scales.shape[0] == codes.shape[0] and scales.shape[1] > 0
        # Powers of two are those of groups of 32, so that their number tells floats of 6 bits.
        six = fits and scales.dtype in _EXPONENTS and codes.shape[1] * BYTE_BITS == scales.shape[1] * _MX_GROUP * 6
        self._kind = _KINDS[6 if six else 4]
        inputs = codes.shape[-1] * BYTE_BITS // self._kind.bits
        if not fits or inputs % scales.shape[1]:
            raise ValueError(f"{codes.name} {list(codes.shape)} and {scales.name} {list(scales.shape)} do not fit")
        if scales.dtype not in _EXPONENTS:
            check_scales(scales)
        self._codes = codes
        self._scales = scales
        self._scale = scale
        self.shape = (codes.shape[0], inputs)

    def rows(self, first: int, last: int) -> Tensor:
        codes = unpack(self._codes[first:last], self._kind.bits).int()
        return self._kind.values[codes] * spread(self._scales_of(first, last), self.shape[1])

    def _scales_of(self, first: int, last: int) -> Tensor:
        scales = self._scales[first:last]
        values = powers_of_two(scales) if self._scales.dtype in _EXPONENTS else scales.float()
        return values * self._scale

    @property
    def codes(self) -> Callable[[int, int], Codes] | None:
        width = self.shape[1] // self._scales.shape[1]
        # A row is whole groups of panels, or halves of them.
        fits = self.shape[1] % GROUP_INPUTS == 0 and (width % GROUP_INPUTS == 0 or 2 * width == GROUP_INPUTS)
        return self._codes_of if fits else None

    def code_scales(self, first: int, last: int) -> NDArray[np.float32]:
        scales: NDArray[np.float32] = (self._scales_of(first, last) / self._kind.factor).numpy()
        return scales

    def _codes_of(self, first: int, last: int) -> Codes:
        kind = self._kind
        scales = Grouped(self.code_scales(first, last))
        return Codes(unpack(self._codes[first:last], kind.bits).numpy(), kind.bits, scales, 0, table=kind.whole)


class ExpertWeight(StoredWeight):
    """The matrix [out, in] of an expert of gpt-oss, of all experts' blocks and exponents."""

    def __init__(self, blocks: Stored, exponents: Stored, number: int) -> None:
        _, outputs, groups, half = blocks.shape
        self._blocks = blocks
        self._exponents = exponents
        self._number = number
        self.shape = (outputs, groups * half * 2)

    def rows(self, first: int, last: int) -> Tensor:
        scales = powers_of_two(self._exponents[self._number, first:last])
        return E2M1[self._numbers(first, last).int()] * spread(scales, self.shape[1])

    @property
    def codes(self) -> Callable[[int, int], Codes] | None:
        return self._codes_of if self.shape[1] // self._exponents.shape[2] % GROUP_INPUTS == 0 else None

    def code_scales(self, first: int, last: int) -> NDArray[np.float32]:
        scales: NDArray[np.float32] = (powers_of_two(self._exponents[self._number, first:last]) / 2).numpy()
        return scales

    def _codes_of(self, first: int, last: int) -> Codes:
        scales = Grouped(self.code_scales(first, last))
        return Codes(self._numbers(first, last).numpy(), _BITS, scales, 0, table=_E2M1_DOUBLED)

    def _numbers(self, first: int, last: int) -> Tensor:
        """Return the codes of some outputs, u8 [outputs, inputs]."""
        return nibbles(self._blocks[self._number, first:last]).flatten(1).to(torch.uint8)


class ExpertsWeight(StoredWeight):
    """The weights [experts, in, out] of gpt-oss, of blocks u8 [experts, out, groups, 16] and exponents [.., groups]."""

    def __init__(self, blocks: Stored, exponents: Stored) -> None:
        if len(blocks.shape) != 4 or exponents.shape != blocks.shape[:3]:
            raise ValueError(
                f"{blocks.name} {list(blocks.shape)} and {exponents.name} {list(exponents.shape)} do not fit"
            )
        experts, outputs, groups, half = blocks.shape
        self._blocks = blocks
        self._exponents = exponents
        self.shape = (experts, groups * half * 2, outputs)

    def rows(self, first: int, last: int) -> Tensor:
        values = E2M1[nibbles(self._blocks[first:last])] * powers_of_two(self._exponents[first:last])[..., None]
        return values.flatten(-2).transpose(1, 2)

    @property
    def experts(self) -> list[list[ExpertWeight]]:
        return [[ExpertWeight(self._blocks, self._exponents, number)] for number in range(self.shape[0])]


def take_experts(pool: Pool, scheme: Scheme) -> dict[str, EncodedWeight]:
    """Take the MXFP4 experts of gpt-oss."""
    found: dict[str, EncodedWeight] = {}
    for name in pool:
        target = name.removesuffix("_blocks")
        if target == name:
            continue
        exponents = pool.take_if(f"{target}_scales")
        if exponents is not None:
            found[target] = ExpertsWeight(pool.take(name), exponents)
        elif scheme.method == "mxfp4":
            raise ValueError(f"{name} has no {target}_scales beside it")
    return found


def take_modelopt(pool: Pool) -> dict[str, EncodedWeight]:
    """Take the NVFP4 weights of ModelOpt. (Its FP8 ones lie as those of others.)"""
    found: dict[str, EncodedWeight] = {}
    for name in pool:
        whole = pool.peek(name)
        weight = pool.peek(name.removesuffix("_scale_2"))
        if whole is None or weight is None or whole is weight or not name.endswith("_scale_2"):
            continue
        scales = pool.take_if(f"{weight.name}_scale")
        if weight.dtype != "U8" or scales is None:
            raise ValueError(f"{name} has no NVFP4 weight and weight_scale beside it")
        check_scales(pool.take(name))
        scale = float(whole.read().float().max())
        found[weight.name] = FloatWeight(pool.take(weight.name), scales, scale)
    return found
