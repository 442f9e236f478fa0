"""Weights in codes: every kind is held exactly, and multiplied as its dequantised weight is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model_worker.cpu.gemm.coded_linear import UnsupportedCodes
from model_worker.cpu.simd.fixed_point import ROUNDING
from shared.weight_codes import E4M3, Codes, Grouped
from tests.model_worker.cpu.coded_weights import KINDS, coded

# Activations keep 16 bits of their row's greatest, weights all of theirs: about 3e-5, and more where sums cancel out.
BOUND = 1e-4
# Elements of a product from which on its error is that of the average.
MANY = 100

kinds = st.sampled_from(sorted(KINDS))
seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=80, deadline=None)
@given(kinds, seeds, st.integers(1, 300), st.integers(1, 3))
def test_panels_hold_a_weight_exactly(kind: str, seed: int, outputs: int, blocks: int) -> None:
    codes = KINDS[kind](np.random.default_rng(seed), outputs, 256 * blocks)
    layer = coded(codes)
    assert np.array_equal(layer.weight.numpy(), codes.weight)
    numbers = torch.randint(0, outputs, (2, 3), generator=torch.Generator().manual_seed(seed % 1000))
    assert np.array_equal(layer.rows(numbers).numpy(), codes.weight[numbers.numpy()])


@settings(max_examples=60, deadline=None)
@given(kinds, seeds, st.integers(1, 40), st.integers(1, 200), st.integers(1, 3), st.booleans())
def test_products_are_those_of_the_dequantised_weight(
    kind: str, seed: int, rows: int, outputs: int, blocks: int, with_bias: bool
) -> None:
    rng = np.random.default_rng(seed)
    codes = KINDS[kind](rng, outputs, 256 * blocks)
    x = rng.standard_normal((rows, 256 * blocks)).astype(np.float32)
    bias = rng.standard_normal(outputs).astype(np.float32) if with_bias else None
    layer = coded(codes, None if bias is None else torch.from_numpy(bias))
    weight = codes.weight.astype(np.float64)
    want = x.astype(np.float64) @ weight.T + (0 if bias is None else bias)
    got = layer(torch.from_numpy(x)).numpy()
    assert got.shape == want.shape
    # Sums may cancel out: what counts is the size of the terms.
    size = np.abs(x) @ np.abs(weight).T
    rounding = ROUNDING * np.abs(x).max(1, keepdims=True) * np.abs(weight).sum(1)
    assert (np.abs(got - want) <= rounding + 1e-6 * size + 1e-6).all()
    if rows * outputs > MANY:
        assert np.linalg.norm(got - want) <= BOUND * np.linalg.norm(want)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_row_does_not_depend_on_the_others(kind: str) -> None:
    """Bit for bit, whatever tile a row falls into, and whichever core multiplies it."""
    rng = np.random.default_rng(7)
    layer = coded(KINDS[kind](rng, 200, 512))
    x = torch.from_numpy(rng.standard_normal((13, 512)).astype(np.float32))
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in (2, 3, 4, 5, 6, 7, 9, 13):
        assert torch.equal(layer(x[:rows]), alone[:rows])
        assert torch.equal(layer(x[-rows:]), alone[-rows:])


def test_rows_that_are_not_finite_stay_their_own() -> None:
    layer = coded(KINDS["Q4_K"](np.random.default_rng(1), 70, 256))
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(1))
    want = layer(x)
    x[1, 5] = torch.inf
    x[4] = 0
    got = layer(x)
    assert got[1].isnan().all()
    assert not got[4].any()
    others = [0, 2, 3, 5]
    assert torch.equal(got[others], want[others])


def test_the_largest_codes_do_not_overflow() -> None:
    for zero, sign in ((0, 1.0), (255, -1.0)):
        codes = Codes(np.full((1, 4096), 255 - zero, np.uint8), 8, Grouped(np.ones((1, 1), np.float16)), zero)
        got = float(coded(codes)(torch.ones(1, 4096)))
        assert got == pytest.approx(sign * 255 * 4096, rel=1e-6)


def refused(codes: Codes) -> str:
    with pytest.raises(UnsupportedCodes) as raised:
        coded(codes)
    return str(raised.value)


def test_codes_that_panels_cannot_hold_are_refused_by_reason() -> None:
    scales = Grouped(np.ones((1, 1), np.float16))
    assert "multiple of 32" in refused(Codes(np.zeros((1, 40), np.uint8), 4, scales, 8))
    eighths = Grouped(np.ones((1, 32), np.float16))
    assert "groups" in refused(Codes(np.zeros((1, 256), np.uint8), 4, eighths, 8))
    sixteenths = Grouped(np.ones((1, 16), np.float16))
    assert "more than 6 bits" in refused(Codes(np.zeros((1, 256), np.uint8), 8, sixteenths, 8))
    steps = Grouped(np.ones((1, 1), np.float16), np.full((1, 8), 200, np.uint8))
    assert "127" in refused(Codes(np.zeros((1, 256), np.uint8), 4, steps, 8))


def test_codes_that_are_floats_are_multiplied_exactly() -> None:
    """The smallest FP8, too, which have no leading one."""
    table = np.linspace(-1, 1, 16, dtype=np.float32)
    for bits, values in ((8, E4M3), (4, table)):
        numbers = np.flatnonzero(np.isfinite(values)).astype(np.uint8)
        codes = np.zeros((len(numbers), 32), np.uint8)
        codes[:, 5] = numbers
        layer = coded(Codes(codes, bits, Grouped(np.ones((len(numbers), 1), np.float32)), 0, table=values))
        x = torch.zeros(3, 32)
        x[:, 5] = torch.tensor([1.0, 0.5, -2.0])
        assert np.array_equal(layer(x).numpy(), x[:, 5:6].numpy() * values[numbers])


def test_floats_that_panels_cannot_hold_are_refused_by_reason() -> None:
    scales = Grouped(np.ones((1, 1), np.float32))
    codes = np.zeros((1, 64), np.uint8)
    finite = np.where(np.isnan(E4M3), 0, E4M3)
    assert "neither that of FP8" in refused(Codes(codes, 8, scales, 0, table=finite))
    assert "zeros, minimums" in refused(Codes(codes, 8, scales, 8, table=E4M3))
    sixteenths = Grouped(np.ones((1, 4), np.float32))
    assert "a table, or codes of more" in refused(Codes(codes, 4, sixteenths, 0, table=finite[:16]))
    codes[0, 3] = 0xFF
    assert "not finite" in refused(Codes(codes, 8, scales, 0, table=E4M3))


def test_bfloat16_activations_are_taken_as_they_are() -> None:
    rng = np.random.default_rng(3)
    codes = KINDS["Q5_0"](rng, 96, 256)
    layer = coded(codes, dtype=torch.bfloat16)
    x: Tensor = torch.from_numpy(rng.standard_normal((5, 256)).astype(np.float32)).bfloat16()
    want = x.double() @ torch.from_numpy(codes.weight).double().T
    got = layer(x)
    assert got.dtype == torch.bfloat16
    assert float((got.double() - want).norm() / want.norm()) < 4e-3
