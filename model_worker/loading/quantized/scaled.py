"""Weights of one number each, int8 or FP8, times scales: of the tensor, of outputs, of groups of inputs, or of blocks.

FP8 of DeepSeek, of ModelOpt and of fbgemm, and compressed-tensors' int- and float-quantized lie so; and the int8 of
bitsandbytes, whose scales are called SCB.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_worker.cpu.gemm.coded_panels import UnsupportedCodes
from model_worker.cpu.gemm.encoded_linear import EncodedWeight, Fp8Numbers
from model_worker.cpu.gemm.int8_linear import Quantized
from model_worker.cpu.simd.dot_codes import GROUP_INPUTS
from model_worker.loading.quantized.bits import check_scales, powers_of_two, spread
from model_worker.loading.quantized.scheme import Scheme, sides_of
from model_worker.loading.quantized.stored_weight import StoredWeight
from model_worker.loading.stored import Pool, Stored
from shared.weight_codes import E4M3, Codes, Grouped

E4M3_TYPE = "F8_E4M3"
FP8 = (E4M3_TYPE, "F8_E5M2")
# Sides of blocks where no file says them.
_BLOCKS = (128, 64, 32, 256)
_MOST_INT8 = 127
_MIDDLE = 128
_CODE_BITS = 8


class ScaledWeight(StoredWeight):
    """A weight [out, in] of int8 or FP8 numbers, scales [row groups, groups of inputs], and zeros of their shape.

    `block` are the outputs that share a row of scales.
    """

    def __init__(
        self, numbers: Stored, scales: Tensor, zeros: Tensor | None = None, block: tuple[int, int] | None = None
    ) -> None:
        self._numbers = numbers
        self._scales = scales
        self._zeros = None if zeros is None or not bool(zeros.any()) else zeros
        self._block = block
        self.shape = numbers.shape

    def rows(self, first: int, last: int) -> Tensor:
        numbers = self._numbers[first:last].float()
        if self._zeros is not None:
            numbers -= self._along(self._zeros, first, last)
        return numbers * self._along(self._scales, first, last)

    def _along(self, values: Tensor, first: int, last: int) -> Tensor:
        """Return what applies to these rows, [last - first, in]."""
        inputs = self.shape[1]
        if self._block is None:
            return spread(values if len(values) == 1 else values[first:last], inputs)
        height, width = self._block
        return values[torch.arange(first, last) // height].repeat_interleave(width, dim=1)[:, :inputs]

    @property
    def codes(self) -> Callable[[int, int], Codes] | None:
        kept = self._numbers.dtype == "I8" or (self._numbers.dtype == E4M3_TYPE and self._zeros is None)
        inputs = self.shape[1]
        groups = self._scales.shape[1]
        width = inputs // groups if self._block is None else self._block[1]
        # A row is equal groups, each of them whole ones of panels.
        fitting = width * groups == inputs and width % GROUP_INPUTS == 0
        return self._codes_of if kept and fitting else None

    def _codes_of(self, first: int, last: int) -> Codes:
        scales = Grouped(self._of_rows(self._scales, first, last).float().numpy())
        codes = self._numbers[first:last].view(torch.uint8).numpy()
        if self._numbers.dtype == E4M3_TYPE:
            return Codes(codes, _CODE_BITS, scales, 0, table=E4M3)
        zeros = _MIDDLE if self._zeros is None else _as_bytes(self._of_rows(self._zeros, first, last))
        return Codes(codes ^ np.uint8(_MIDDLE), _CODE_BITS, scales, zeros)

    def _of_rows(self, values: Tensor, first: int, last: int) -> Tensor:
        """Return what applies to the groups of these rows, [last - first, groups]."""
        if self._block is not None:
            return values[torch.arange(first, last) // self._block[0]]
        return (values if len(values) == 1 else values[first:last]).expand(last - first, -1)

    @property
    def is_fp8(self) -> bool:
        whole = self._block is not None or self._scales.shape[1] == 1
        return self._numbers.dtype == E4M3_TYPE and self._zeros is None and whole

    @property
    def fp8_block(self) -> tuple[int, int] | None:
        return self._block

    def fp8(self) -> Fp8Numbers:
        if not self.is_fp8:
            return super().fp8()
        if self._block is not None:
            return Fp8Numbers(self._numbers.read(), self._scales.float())
        return Fp8Numbers(self._numbers.read(), self._scales[:, 0].float().expand(self.shape[0]).contiguous())

    def quantized(self) -> Quantized:
        """Numbers of int8 with a scale for each output are kept as they are."""
        plain = self._numbers.dtype == "I8" and self._zeros is None and self._scales.shape[1] == 1
        if not plain or self._block is not None:
            return super().quantized()
        values = self._numbers.read()
        if int(values.min()) < -_MOST_INT8:
            return super().quantized()
        return Quantized(values, self._scales[:, 0].expand(self.shape[0]).contiguous())


def _as_bytes(zeros: Tensor) -> NDArray[np.uint8]:
    """Return zeros of int8 numbers as those of bytes. UnsupportedCodes for others."""
    raised = zeros + _MIDDLE
    bytes_of = raised.clamp(0, np.iinfo(np.uint8).max).to(torch.uint8)
    if not torch.equal(bytes_of.to(raised.dtype), raised):
        raise UnsupportedCodes("it has zeros that are no numbers of 8 bits")
    return bytes_of.numpy()


def scales_of(stored: Stored, weight: Stored, block: tuple[int, int] | None) -> tuple[Tensor, tuple[int, int] | None]:
    """Return a weight's scales as a matrix, and the sides of their blocks if they belong to blocks. ValueError if they
    fit neither outputs nor blocks."""
    outputs, inputs = weight.shape
    check_scales(stored, exponents=True)
    values = stored.read()
    values = powers_of_two(values) if values.dtype in (torch.uint8, torch.float8_e8m0fnu) else values.float()
    if values.numel() == 1:
        return values.reshape(1, 1), None
    if values.dim() == 1 and len(values) == outputs:
        return values[:, None], None
    if values.dim() == 2:
        rows, columns = values.shape
        if rows == outputs and (block is None or block[0] == 1) and inputs % columns == 0:
            return values, None
        for sides in [block] if block is not None else [(side, side) for side in _BLOCKS]:
            if (rows, columns) == (-(-outputs // sides[0]), -(-inputs // sides[1])):
                return values, sides
    raise ValueError(
        f"{stored.name} has shape {list(stored.shape)}, which fits neither the outputs nor blocks of {weight.name} "
        f"{list(weight.shape)}"
    )


def take_fp8(pool: Pool, scheme: Scheme) -> dict[str, EncodedWeight]:
    """Take FP8 weights with their scales. ValueError for one that has none: its numbers alone are no weight."""
    given = scheme.get("weight_block_size")
    block = None if given is None else sides_of(given, "weight_block_size", scheme.file)
    found: dict[str, EncodedWeight] = {}
    for name in pool:
        weight = pool.peek(name)
        if weight is None or weight.dtype not in FP8:
            continue
        # Of ".weight" and of fused experts without it.
        scale = next((s for end in ("_scale_inv", "_scale") if (s := pool.take_if(f"{name}{end}")) is not None), None)
        if scale is None:
            raise ValueError(
                f"{name} is FP8 and has no scale beside it ({name}_scale or _scale_inv), so its values are unknown: "
                "download the files anew"
            )
        if len(weight.shape) != 2:
            raise ValueError(f"{name} is FP8 of shape {list(weight.shape)}; only matrices are read")
        found[name] = ScaledWeight(pool.take(name), *_with_block(scale, weight, block))
    return found


def _with_block(
    scale: Stored, weight: Stored, block: tuple[int, int] | None
) -> tuple[Tensor, Tensor | None, tuple[int, int] | None]:
    values, sides = scales_of(scale, weight, block)
    return values, None, sides


def take_int8(pool: Pool) -> dict[str, EncodedWeight]:
    """Take the int8 weights of bitsandbytes: numbers * SCB / 127."""
    found: dict[str, EncodedWeight] = {}
    for name in pool:
        module, dot, kind = name.rpartition(".")
        if kind != "SCB":
            continue
        weight = pool.peek(f"{module}{dot}weight")
        scales = pool.take(name)
        if weight is None or weight.dtype != "I8" or scales.shape != weight.shape[:1]:
            raise ValueError(f"{name} has no int8 weight of its outputs beside it")
        layout = pool.take_if(f"{module}{dot}weight_format")
        if layout is not None and int(layout.read().max()) != 0:
            raise ValueError(
                f"{layout.name} is {int(layout.read().max())}; of bitsandbytes' layouts, 0 (row) can be read"
            )
        found[weight.name] = ScaledWeight(pool.take(weight.name), scales.read().float()[:, None] / _MOST_INT8)
    return found
