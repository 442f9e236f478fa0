"""Blocks of GGUF files, one number at a time, by their published layout."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest

from shared.gguf.code_blocks import codes_of
from tests.model_worker.cpu.coded_weights import BLOCK_TYPES, random_blocks

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def half(block: bytes, place: int) -> float:
    return float(struct.unpack_from("<e", block, place)[0])


def nibble(block: bytes, place: int, element: int) -> int:
    """Element of a group of 32 whose first half are low nibbles."""
    return block[place + element % 16] >> 4 * (element // 16) & 15


def k_numbers(block: bytes, group: int) -> tuple[int, int]:
    s = block[4:16]
    if group < 4:
        return s[group] & 63, s[group + 4] & 63
    return s[group + 4] & 15 | s[group - 4] >> 6 << 4, s[group + 4] >> 4 | s[group] >> 6 << 4


def k_nibble(block: bytes, place: int, element: int) -> int:
    group, rest = divmod(element, 32)
    return block[place + group // 2 * 32 + rest] >> 4 * (group % 2) & 15


def q6_k(block: bytes, element: int) -> float:
    t, rest = divmod(element, 128)
    k, rest = divmod(rest, 32)
    low = block[64 * t + 32 * (k & 1) + rest] >> 4 * (k // 2) & 15
    high = block[128 + 32 * t + rest] >> 2 * k & 3
    scale = int(struct.unpack_from("b", block, 192 + 8 * t + 2 * k + rest // 16)[0])
    return half(block, 208) * float(scale * ((low | high << 4) - 32))


def element_of(name: str, block: bytes, i: int) -> float:
    """The value of an element of a block."""
    if name == "Q8_0":
        return half(block, 0) * float(struct.unpack_from("b", block, 2 + i)[0])
    if name in ("Q4_0", "Q4_1", "IQ4_NL", "MXFP4"):
        code = nibble(block, {"Q4_1": 4, "MXFP4": 1}.get(name, 2), i)
        if name == "MXFP4":
            return 2.0 ** (block[0] - 127) * (E2M1[code & 7] * (-1 if code > 7 else 1))
        value = {"Q4_0": code - 8, "Q4_1": code, "IQ4_NL": IQ4[code]}[name]
        return half(block, 0) * value + (half(block, 2) if name == "Q4_1" else 0)
    if name in ("Q5_0", "Q5_1"):
        place = 2 if name == "Q5_0" else 4
        fifth = int(struct.unpack_from("<I", block, place)[0]) >> i & 1
        code = nibble(block, place + 4, i) | fifth << 4
        return half(block, 0) * (code - 16) if name == "Q5_0" else half(block, 0) * code + half(block, 2)
    if name == "Q6_K":
        return q6_k(block, i)
    group, rest = divmod(i, 32)
    if name == "IQ4_XS":
        upper = int(struct.unpack_from("<H", block, 2)[0]) >> 2 * group & 3
        scale = (block[4 + group // 2] >> 4 * (group % 2) & 15 | upper << 4) - 32
        return half(block, 0) * (scale * IQ4[nibble(block, 8 + 16 * group, rest)])
    scale, least = k_numbers(block, group)
    code = k_nibble(block, 16 if name == "Q4_K" else 48, i)
    if name == "Q5_K":
        code |= (block[16 + rest] >> group & 1) << 4
    return half(block, 0) * (scale * code) - half(block, 2) * least


def elements(name: str, row: bytes) -> Iterator[float]:
    kind = BLOCK_TYPES[name]
    for begin in range(0, len(row), kind.num_bytes):
        for i in range(kind.inputs):
            yield element_of(name, row[begin : begin + kind.num_bytes], i)


@pytest.mark.parametrize("name", sorted(BLOCK_TYPES))
def test_codes_are_the_values_of_the_published_layout(name: str) -> None:
    rows = random_blocks(np.random.default_rng(), name, 3, 2)
    codes = codes_of(BLOCK_TYPES[name], rows)
    want = np.array([list(elements(name, row.tobytes())) for row in rows])
    assert int(codes.codes.max()) < 2**codes.bits
    # In float32 each product and sum is rounded.
    assert np.allclose(codes.weight, want, rtol=2e-7, atol=2e-7 * np.abs(want).max())
