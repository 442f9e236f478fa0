"""Rows of GGUF blocks as codes. Knows the blocks of ggml's types; does not know files, nor the purpose of a weight.

`codes_of(kind, rows)` takes the bytes of some outputs, uint8 [outputs, bytes of a row], as they lie in the file.
All numbers are little endian; d, m and dmin are float16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.gguf.format import BlockType
from shared.weight_codes import Codes, Grouped

Bytes = NDArray[np.uint8]

# Values of IQ4_NL and IQ4_XS by code, and those of MXFP4, doubled.
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def has_codes(kind: BlockType) -> bool:
    """Whether blocks of this type are codes of one kind."""
    return kind.name in _DECODERS


def codes_of(kind: BlockType, rows: Bytes) -> Codes:
    """Return the codes of rows of blocks of this type. Raises KeyError for a type that has none."""
    return _DECODERS[kind.name](rows.reshape(len(rows), -1, kind.num_bytes))


def _halves(blocks: Bytes, begin: int) -> NDArray[np.float16]:
    """Return the float16 at this byte of each block: [outputs, blocks]."""
    return np.ascontiguousarray(blocks[..., begin : begin + 2]).view("<f2")[..., 0]


def _nibbles(part: Bytes) -> Bytes:
    """Return the codes of bytes [.., n]: [.., 2, n], those of low nibbles first."""
    return np.stack([part & 15, part >> 4], axis=-2)


def _rows(codes: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(codes).reshape(len(codes), -1)


def _q4_0(blocks: Bytes) -> Codes:
    return Codes(_rows(_nibbles(blocks[..., 2:])), 4, Grouped(_halves(blocks, 0)), 8)


def _q4_1(blocks: Bytes) -> Codes:
    minimums = Grouped(_halves(blocks, 2))
    return Codes(_rows(_nibbles(blocks[..., 4:])), 4, Grouped(_halves(blocks, 0)), 0, minimums)


def _fives(blocks: Bytes, begin: int) -> Bytes:
    """Return codes of five bits: 32 fifth bits at this byte of each block, then nibbles."""
    fifth = np.unpackbits(blocks[..., begin : begin + 4], axis=-1, bitorder="little")
    nibbles = _nibbles(blocks[..., begin + 4 :])
    return _rows(nibbles | fifth.reshape(nibbles.shape) << 4)


def _q5_0(blocks: Bytes) -> Codes:
    return Codes(_fives(blocks, 2), 5, Grouped(_halves(blocks, 0)), 16)


def _q5_1(blocks: Bytes) -> Codes:
    return Codes(_fives(blocks, 4), 5, Grouped(_halves(blocks, 0)), 0, Grouped(_halves(blocks, 2)))


def _q8_0(blocks: Bytes) -> Codes:
    return Codes(_rows(blocks[..., 2:] ^ 0x80), 8, Grouped(_halves(blocks, 0)), 128)


def _k_scales(blocks: Bytes) -> tuple[Grouped, Grouped]:
    """Return the scales and the minimums of Q4_K and Q5_K: six bits of each group, in twelve bytes."""
    first, second, third = (blocks[..., begin : begin + 4] for begin in (4, 8, 12))
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    minimums = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return Grouped(_halves(blocks, 0), _rows(scales)), Grouped(-_halves(blocks, 2), _rows(minimums))


def _q4_k(blocks: Bytes) -> Codes:
    scales, minimums = _k_scales(blocks)
    quarters = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    return Codes(_rows(_nibbles(quarters)), 4, scales, 0, minimums)


def _q5_k(blocks: Bytes) -> Codes:
    scales, minimums = _k_scales(blocks)
    quarters = blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32)
    fifth = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    nibbles = _nibbles(quarters)
    return Codes(_rows(nibbles | fifth.reshape(nibbles.shape) << 4), 5, scales, 0, minimums)


def _q6_k(blocks: Bytes) -> Codes:
    lower = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64)
    upper = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    nibbles = _nibbles(lower).reshape(*blocks.shape[:-1], 2, 4, 32)
    pairs = upper >> 2 * np.arange(4, dtype=np.uint8)[:, None] & 3
    scales = Grouped(_halves(blocks, 208), _rows(blocks[..., 192:208]).view(np.int8))
    return Codes(_rows((nibbles | pairs << 4).astype(np.uint8)), 6, scales, 32)


def _iq4_nl(blocks: Bytes) -> Codes:
    return Codes(_rows(_nibbles(blocks[..., 2:])), 4, Grouped(_halves(blocks, 0)), 0, table=_IQ4)


def _iq4_xs(blocks: Bytes) -> Codes:
    lower = _nibbles(blocks[..., 4:8]).swapaxes(-1, -2).reshape(*blocks.shape[:-1], 8)
    numbers = np.ascontiguousarray(blocks[..., 2:4]).view("<u2")
    upper = (numbers >> 2 * np.arange(8, dtype=np.uint16) & 3).astype(np.uint8)
    steps = _rows((lower | upper << 4).astype(np.int8) - np.int8(32))
    groups = blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16)
    return Codes(_rows(_nibbles(groups)), 4, Grouped(_halves(blocks, 0), steps), 0, table=_IQ4)


def _mxfp4(blocks: Bytes) -> Codes:
    # Half of 2 ** (e - 127), since the table is doubled.
    scales = np.ldexp(np.float32(1.0), blocks[..., 0].astype(np.int32) - 128)
    return Codes(_rows(_nibbles(blocks[..., 1:])), 4, Grouped(scales), 0, table=_E2M1_DOUBLED)


# How blocks [outputs, blocks, bytes] become codes, by ggml's names.
_DECODERS: dict[str, Callable[[Bytes], Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
