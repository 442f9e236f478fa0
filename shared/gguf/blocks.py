"""Decodes the blocks of GGUF's types to float32, in the order of operations of the format's own library.

Each function takes blocks u8[n, bytes of a block] and returns f32[n, inputs of a block]. Codes are in groups, each of
which has a scale, and some a minimum; the module knows how they are packed. Does not know files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.gguf.format import BlockType

Blocks = NDArray[np.uint8]
Values = NDArray[np.float32]

# Outputs that are decoded at a time: their values stay in a cache.
OUTPUTS_AT_A_TIME = 64

_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    np.float32,
)
# Values of E2M1, twice as large as they are, so that they are whole.
_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def decode(kind: BlockType, rows: Blocks) -> Values:
    """Decode rows u8[n, bytes of a row] to f32[n, inputs]."""
    blocks = np.ascontiguousarray(rows).reshape(-1, kind.num_bytes)
    with np.errstate(over="ignore", invalid="ignore"):
        return _DECODERS[kind.name](blocks).reshape(len(rows), -1)


def _float32(blocks: Blocks) -> Values:
    return blocks.view("<f4").astype(np.float32, copy=False)


def _float16(blocks: Blocks) -> Values:
    return blocks.view("<f2").astype(np.float32)


def _bfloat16(blocks: Blocks) -> Values:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _half(blocks: Blocks, first: int) -> Values:
    """Return the float16 at this byte of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, first : first + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Blocks) -> Blocks:
    """Return the low halves of the bytes [n, m], and behind them the high ones: [n, 2 m]."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(blocks: Blocks, first: int) -> Blocks:
    """Return bit j of the 32 bits that begin at this byte for code j, as 16 or 0."""
    bits: Blocks = np.unpackbits(blocks[:, first : first + 4], axis=1, bitorder="little")
    return bits * np.uint8(16)


def _q4_0(blocks: Blocks) -> Values:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Blocks) -> Values:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Blocks) -> Values:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (codes.astype(np.float32) - 16)


def _q5_1(blocks: Blocks) -> Values:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * codes.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Blocks) -> Values:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


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


def _scales_and_minima(packed: Blocks) -> tuple[Values, Values]:
    """Return eight scales and eight minima of six bits each from 12 bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _groups_of_32(packed: Blocks) -> Blocks:
    """Return codes [n, 8, 32]: byte 32 p + l has code l of group 2 p, and in its high half that of group 2 p + 1."""
    halves: Blocks = packed.reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    return (halves & np.uint8(15)).reshape(-1, 8, 32)


def _q4_k(blocks: Blocks) -> Values:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    return _grouped(_groups_of_32(blocks[:, 16:]), _half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q5_k(blocks: Blocks) -> Values:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1
    codes = _groups_of_32(blocks[:, 48:]) | fifth << 4
    return _grouped(codes, _half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q6_k(blocks: Blocks) -> Values:
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1) & 15
    codes = low.reshape(-1, 256) | _pairs_of_bits(blocks[:, 128:192]) << 4
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _grouped(codes.astype(np.float32) - 32, _half(blocks, 208) * scales)


def _iq4_nl(blocks: Blocks) -> Values:
    return _half(blocks, 0) * _IQ4_VALUES[_nibbles(blocks[:, 2:])]


def _iq4_xs(blocks: Blocks) -> Values:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15
    scales = (low.reshape(-1, 8) | high.astype(np.uint8) << 4).astype(np.float32) - 32
    codes = _nibbles(blocks[:, 8:].reshape(-1, 16)).reshape(-1, 8, 32)
    return _grouped(_IQ4_VALUES[codes], _half(blocks, 0) * scales)


def _mxfp4(blocks: Blocks) -> Values:
    # Half of the power of two that the byte stands for; ldexp is exact for those that float32 has as subnormals, too.
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return scales * _E2M1_DOUBLED[_nibbles(blocks[:, 1:])]


_DECODERS: dict[str, Callable[[Blocks], Values]] = {
    "F32": _float32,
    "F16": _float16,
    "BF16": _bfloat16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
