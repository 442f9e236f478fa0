"""The screen never leaves out the panel of the largest logit, and leaves out nearly all others."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from model_worker.cpu.fused.stack import FusedStack
from model_worker.cpu.gemm.int8_format import Int8Format
from model_worker.cpu.gemm.int8_linear import quantize
from model_worker.cpu.gemm.packed_linear import PackedLinear
from model_worker.cpu.gemm.products import argmax_product
from model_worker.cpu.gemm.screened_head import SCREENED_ROWS, Screen, choose, screen
from model_worker.cpu.gemm.weight_format import PANEL
from model_worker.cpu.gemm.word_format import WordFormat
from model_worker.cpu.simd.argmax import ArgmaxBuffers, reduce_argmax
from model_worker.cpu.simd.dot_bf16 import TILE_ROWS, operand_dtype
from model_worker.cpu.simd.fixed_point import room_for, width_of
from model_worker.runner import ModelRunner
from tests.model_worker.cpu.test_fused_stack import FUSED, batches, load
from tests.model_worker.cpu.test_int8_linear import split_by_core

DTYPES = st.sampled_from([torch.bfloat16, torch.float32])
SEEDS = st.integers(0, 2**32 - 1)


def operand_of(x: Tensor, head: PackedLinear) -> NDArray[Any]:
    padded = torch.nn.functional.pad(x, (0, head.input_width - x.shape[1])).contiguous()
    in_words = operand_dtype(_like(x).dtype) == np.uint16
    return (padded.view(torch.uint16) if in_words else padded.float()).numpy()


def _like(x: Tensor) -> NDArray[Any]:
    return np.empty(1, np.uint16 if x.dtype == torch.bfloat16 else np.float32)


def tiles() -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    tile = np.empty((TILE_ROWS, PANEL), np.float32)
    return tile, tile.view(np.int32)


def screened(x: Tensor, head: PackedLinear, width: int) -> Screen:
    """A screen after both of its kernels, the panels of the first in two pieces, the later one first."""
    of, operand, rows = Screen(head, width), operand_of(x, head), len(x)
    count, like = len(of.bounds), _like(x)
    digits = split_by_core(operand, like, room_for(1, rows, rows * width_of(operand.shape[1]), like))
    for taken in ((count // 2, count - count // 2), (0, count // 2)):
        screen(taken, operand, Int8Format(like, digits), of.panels.ctypes.data, width, of.peaks[:rows], *tiles())
    choose(operand, of.bounds, of.peaks[:rows], of.candidates)
    return of


def picked(x: Tensor, head: PackedLinear, width: int, numbers: NDArray[np.int64]) -> list[int]:
    """The largest tokens as the stack finds them, in these of lm_head's panels."""
    rows = len(x)
    kept, nothing = ArgmaxBuffers(1, rows), np.empty((0, width), np.float32)
    none, address = np.full(rows, -1), head.panels.ctypes.data
    taken, operand = (0, len(numbers)), operand_of(x, head)
    keys, places, weight_format = kept.keys[0], kept.places[0], WordFormat(_like(x))
    argmax_product(taken, numbers, operand, address, none, nothing, keys, places, weight_format, *tiles())
    reduce_argmax(kept.keys, kept.places, kept.tokens)
    return list(kept.tokens)


def weights(rng: np.random.Generator, outputs: int, inputs: int, kind: str) -> Tensor:
    """Alike, of very different lengths, hardly different from each other, or in part the same."""
    values = rng.standard_normal((outputs, inputs))
    if kind == "lengths":
        values *= np.exp(2 * rng.standard_normal((outputs, 1)))
    elif kind == "near":
        values = values[:1] + 1e-3 * values
    elif kind == "same":
        values = values[rng.integers(0, max(1, outputs // 3), outputs)]
    elif kind == "tiny":
        values *= 1e-37
    return torch.from_numpy(values)


@settings(deadline=None, max_examples=150)
@given(
    SEEDS,
    st.integers(1, 400),
    st.integers(1, 200),
    st.integers(1, SCREENED_ROWS),
    DTYPES,
    st.sampled_from(["alike", "lengths", "near", "same", "tiny"]),
    st.sampled_from([0.0, 1.0, 1e-3, 1e37, np.inf, np.nan]),
)
def test_the_largest_is_that_of_all_panels(
    seed: int, outputs: int, inputs: int, rows: int, dtype: torch.dtype, kind: str, outlier: float
) -> None:
    rng = np.random.default_rng(seed)
    head = PackedLinear(weights(rng, outputs, inputs, kind).to(dtype), None)
    x = torch.from_numpy(rng.standard_normal((rows, inputs))).to(dtype)
    x[rng.integers(rows), rng.integers(inputs)] = outlier
    width = int(rng.integers(max(1, outputs - 20), outputs + 1))
    found = screened(x, head, width).candidates
    every = np.arange(-(-width // PANEL))
    want = picked(x, head, width, every)
    assert picked(x, head, width, found[1 : 1 + found[0]]) == want
    finite = torch.nn.functional.linear(x.double(), head.weight[:width].double())
    if torch.isfinite(finite).all() and finite.abs().max() < 1e30:
        exact = finite.gather(1, torch.tensor(want)[:, None])[:, 0]
        assert torch.allclose(exact, finite.amax(1), rtol=1e-3, atol=1e-3 * float(finite.abs().max()) + 1e-30)


@settings(deadline=None, max_examples=60)
@given(SEEDS, st.integers(1, 300), st.integers(1, 300), DTYPES, st.sampled_from(["alike", "lengths", "near"]))
def test_no_sum_is_further_off_than_its_bound(
    seed: int, outputs: int, inputs: int, dtype: torch.dtype, kind: str
) -> None:
    """Against sums in float64, with each vector once along what rounding took from a row, the worst there is."""
    rng = np.random.default_rng(seed)
    head = PackedLinear(weights(rng, outputs, inputs, kind).to(dtype), None)
    exact, of = head.weight.double(), Screen(head, outputs)
    lost = (head.weight[:1].float() - quantize(head.weight[:1]).weight)[0].double()
    x = (lost / lost.norm().clamp_min(1e-12) if rng.random() < 0.5 else torch.randn(inputs).double())[None].to(dtype)
    found = screened(x, head, outputs)
    sums = torch.nn.functional.linear(x.double(), exact)[0]
    peaks = found.peaks.view(np.float32)[0]
    for panel, bound in enumerate(of.bounds):
        most = float(sums[panel * PANEL : (panel + 1) * PANEL].max())
        assert abs(most - float(peaks[panel])) <= float(bound) * float(x.double().norm()) + 1e-30


def test_few_panels_remain() -> None:
    rng = np.random.default_rng()
    head = PackedLinear(torch.from_numpy(rng.standard_normal((16_384, 256))).bfloat16(), None)
    shares = [screened(torch.randn(1, 256).bfloat16(), head, 16_384).candidates[0] / 256 for _ in range(20)]
    assert np.mean(shares) < 0.05


def test_a_screen_that_leaves_out_little_pauses() -> None:
    head = PackedLinear(torch.randn(1, 64).expand(1024, 64).bfloat16(), None)
    of = screened(torch.randn(1, 64).bfloat16(), head, 1024)
    assert of.candidates[0] == 16
    assert of.pays()
    of.look_back()
    answers = [of.pays() for _ in range(1000)]
    assert not any(answers[:100])
    assert all(answers[-100:])


@pytest.mark.parametrize("arch", FUSED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stack_with_a_screen_picks_the_largest_logits(
    arch: str, dtype: str, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model_worker.cpu.fused.stack.WORTH_SCREENING", 0)
    passes: list[int] = []
    look_back = Screen.look_back

    def counted(of: Screen) -> None:
        passes.append(int(of.candidates[0]))
        look_back(of)

    monkeypatch.setattr(Screen, "look_back", counted)
    monkeypatch.setattr(Screen, "pays", lambda of: True)  # of two panels no quarter can be left out
    rng = np.random.default_rng()
    loaded = load(arch, dtype, tmp_path_factory.getbasetemp())
    assert isinstance(loaded.stack, FusedStack)
    deadline = time.monotonic() + 60
    while not loaded.stack.screens:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    whole, picking = ModelRunner(loaded, 32, 16), ModelRunner(loaded, 32, 16)
    few = 0
    for _ in range(6):
        for step in batches(rng, 16, 32):
            every, rows = whole.backend.logits(step), len(step.logit_positions)
            tokens, _ = picking.backend.greedy(step, np.zeros(rows, np.bool_))
            assert tokens.tolist() == every.argmax(-1).tolist()
            few += 0 < rows <= SCREENED_ROWS
    assert len(passes) == few
    assert all(passes)
