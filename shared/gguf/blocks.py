"""Decodes the blocks of GGUF's types to float32, in the order of operations of the format's own library.

Most types are codes, which code_blocks.py unpacks. Of the others a function takes blocks u8[n, bytes of a block] and
returns f32[n, inputs of a block]. Does not know files.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.gguf.code_blocks import codes_of, has_codes
from shared.gguf.format import BlockType

Blocks = NDArray[np.uint8]
Values = NDArray[np.float32]

# Outputs that are decoded at a time: their values stay in a cache.
OUTPUTS_AT_A_TIME = 64


def decode(kind: BlockType, rows: Blocks) -> Values:
    """Decode rows u8[n, bytes of a row] to f32[n, inputs]."""
    with np.errstate(over="ignore", invalid="ignore"):
        if has_codes(kind):
            return codes_of(kind, rows).weight
        if kind.name not in _DECODERS:
            return _by_package(kind, rows)
        blocks = np.ascontiguousarray(rows).reshape(-1, kind.num_bytes)
        return _DECODERS[kind.name](blocks).reshape(len(rows), -1)


def package_decodes(kind: BlockType) -> bool:
    """Whether the format's own package is installed, and knows a type of PACKAGE_TYPES."""
    if find_spec("gguf") is None:
        return False
    from gguf import GGMLQuantizationType

    return kind.name in GGMLQuantizationType.__members__


def _by_package(kind: BlockType, rows: Blocks) -> Values:
    """Decode rows of PACKAGE_TYPES by the format's own package, which is of the extra gguf."""
    from gguf import GGMLQuantizationType, dequantize

    values: Values = dequantize(np.ascontiguousarray(rows), GGMLQuantizationType[kind.name])
    return values.reshape(len(rows), -1)


def _float32(blocks: Blocks) -> Values:
    return blocks.view("<f4").astype(np.float32, copy=False)


def _float16(blocks: Blocks) -> Values:
    return blocks.view("<f2").astype(np.float32)


def _bfloat16(blocks: Blocks) -> Values:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _half(blocks: Blocks, first: int) -> Values:
    """Return the float16 at this byte of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, first : first + 2]).view("<f2").astype(np.float32)


def _pairs_of_bits(packed: Blocks) -> Blocks:
    """Return four codes of two bits from each byte of 64: code 128 t + 32 k + l from bits 2 k of byte 32 t + l."""
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    codes: Blocks = packed.reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)
    return codes.reshape(-1, 256)


def _grouped(codes: Any, scales: Values, minima: Values | None = None) -> Values:
    """Multiply each group of codes [n, groups, size] by its scale [n, groups], and subtract its minimum."""
    groups = codes.reshape(len(codes), scales.shape[1], -1).astype(np.float32, copy=False)
    values: Values = scales[:, :, None] * groups
    if minima is not None:
        values -= minima[:, :, None]
    return values


def _q2_k(blocks: Blocks) -> Values:
    scales = _half(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    minima = _half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    return _grouped(_pairs_of_bits(blocks[:, 16:80]), scales, minima)


def _q3_k(blocks: Blocks) -> Values:
    """Byte l of the first 32 has the third bits of codes l, 32 + l and so on, inverted."""
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1).reshape(-1, 256)
    codes = _pairs_of_bits(blocks[:, 32:96]).astype(np.float32) - ((third ^ 1) << 2).astype(np.float32)
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    high = (packed[:, None, 8:] >> shifts & 3).reshape(-1, 16)
    scales = (low | high << 4).astype(np.float32) - 32
    return _grouped(codes, _half(blocks, 108) * scales)


# Types that are no codes, or codes that are too rare for panels of their own.
_DECODERS: dict[str, Callable[[Blocks], Values]] = {
    "F32": _float32,
    "F16": _float16,
    "BF16": _bfloat16,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
}
