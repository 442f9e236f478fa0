"""The loops of low-rank products multiply, and give a row the same bits whatever rows go with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_worker.cpu.gemm.weight_format import PANEL
from model_worker.cpu.simd.dot_bf16 import operand_dtype
from model_worker.cpu.simd.dot_low_rank import RANKS, add_panel, multiply_ranks


def rounding(terms: int) -> float:
    """The most that a sum in float32 is off, in any order, as a share of the sum of its terms' sizes."""
    return (terms + 4) * 2.0**-24


def words(rows: torch.Tensor) -> np.ndarray:
    """Words [step, rows] of a matrix [rows, inputs]."""
    return np.ascontiguousarray(rows.contiguous().view(torch.int32).numpy().view(np.uint32).T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [2, 6, 48, 130])
def test_low_rank_tiles_multiply(dtype: torch.dtype, inputs: int) -> None:
    rng = np.random.default_rng()
    like = np.empty(1, np.uint16 if dtype == torch.bfloat16 else np.float32)
    rows = 9
    x = torch.randn(rows, inputs).to(dtype)
    operand = x.view(torch.uint16).numpy() if operand_dtype(like.dtype) == np.uint16 else x.float().numpy()
    a = torch.randn(RANKS, inputs).to(dtype)
    scales, offsets = rng.standard_normal((2, RANKS)).astype(np.float32)
    block = np.concatenate([scales.view(np.uint32), offsets.view(np.uint32), words(a).ravel()])
    ranks = np.full((rows, 3 * RANKS), 7, np.float32)
    multiply_ranks(operand, like, 1, rows - 1, block.ctypes.data, ranks, RANKS)
    want = (x.double() @ a.double().T).numpy() * scales + offsets
    size = (x.double().abs() @ a.double().abs().T).numpy() * np.abs(scales) + np.abs(offsets)
    assert (np.abs(ranks[:, RANKS : 2 * RANKS] - want) <= rounding(inputs) * size)[1:].all()
    assert (ranks[0] == 7).all()
    assert (ranks[:, :RANKS] == 7).all()
    assert (ranks[:, 2 * RANKS :] == 7).all()
    alone = np.empty_like(ranks)
    for row in range(1, rows):
        multiply_ranks(operand, like, row, 1, block.ctypes.data, alone, RANKS)
    assert np.array_equal(alone[1:, RANKS : 2 * RANKS], ranks[1:, RANKS : 2 * RANKS])

    b = torch.randn(PANEL, RANKS).to(dtype)
    panel = words(b)
    begun = rng.standard_normal((6, PANEL)).astype(np.float32)
    tile = begun.copy()
    half = begun.copy()
    add_panel(ranks, like, 3, 5, RANKS, len(panel), panel.ctypes.data, True, tile, 1)
    add_panel(ranks, like, 3, 5, RANKS, len(panel), panel.ctypes.data + PANEL * 2, False, half, 1)
    exact = ranks[3:8, RANKS : 2 * RANKS].astype(np.float64) @ b.double().numpy().T
    size = np.abs(ranks[3:8, RANKS : 2 * RANKS]).astype(np.float64) @ b.double().abs().numpy().T + np.abs(begun[1:])
    assert (np.abs(tile[1:] - begun[1:] - exact) <= rounding(RANKS) * size).all()
    assert np.array_equal(tile[0], begun[0])
    apart = begun.copy()
    for row in range(5):
        add_panel(ranks, like, 3 + row, 1, RANKS, len(panel), panel.ctypes.data, True, apart, 1 + row)
    assert np.array_equal(apart, tile)
    width = PANEL // 2
    size = size + np.abs(begun[1:]).max()
    assert (np.abs(half[1:, :width] - begun[1:, :width] - exact[:, width:]) <= rounding(RANKS) * size[:, width:]).all()
    assert np.array_equal(half[:, width:], begun[:, width:])
