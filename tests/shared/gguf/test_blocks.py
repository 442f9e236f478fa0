"""Blocks decode to the bits that the `gguf` package gives, whatever is in them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shared.gguf.blocks import decode
from shared.gguf.file import Matrix
from shared.gguf.format import PACKAGE_TYPES, TYPES

INPUTS = 512


@pytest.mark.parametrize("number", TYPES)
@settings(max_examples=25)
@given(data=st.data())
def test_random_blocks(number: int, data: st.DataObject) -> None:
    """Scales are whatever bits come, infinities and NaN included."""
    kind = TYPES[number]
    rows = data.draw(arrays.arrays(np.uint8, (data.draw(st.integers(1, 5)), kind.row_bytes(INPUTS))))
    compare(number, rows)


@pytest.mark.parametrize("number", TYPES)
def test_many_random_blocks(number: int) -> None:
    rows = np.random.default_rng().integers(0, 256, (200, TYPES[number].row_bytes(INPUTS)), dtype=np.uint8)
    compare(number, rows)


def compare(number: int, rows: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        wanted = gguf.dequantize(rows, GGMLQuantizationType(number)).reshape(len(rows), INPUTS)
    found = decode(TYPES[number], rows)
    assert found.dtype == np.float32
    both_nan = np.isnan(found) & np.isnan(wanted)
    assert np.array_equal(found.view(np.uint32)[~both_nan], wanted.view(np.uint32)[~both_nan])


def test_sizes_are_those_of_the_package() -> None:
    for number, kind in (TYPES | PACKAGE_TYPES).items():
        named = GGMLQuantizationType(number)
        assert (kind.name, kind.inputs, kind.num_bytes) == (named.name, *gguf.GGML_QUANT_SIZES[named])


def test_rows_in_another_order_move_whole() -> None:
    kind = TYPES[12]
    random = np.random.default_rng()
    rows = random.integers(0, 100, (70, kind.row_bytes(INPUTS)), dtype=np.uint8)
    matrix = Matrix("blk.0.attn_q.weight", kind, (70, INPUTS), rows)
    order = random.permutation(70)
    moved = matrix.in_order(order)
    assert np.array_equal(moved.raw(3, 60), rows[order[3:60]])
    assert np.array_equal(moved.decode(3, 60), matrix.decode(0, 70)[order[3:60]], equal_nan=True)
