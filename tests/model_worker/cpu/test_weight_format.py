"""Products take any format of weights: here one that exists only in this test, with four bits a weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher
from numpy.typing import NDArray

from model_worker.cpu.gemm import products
from model_worker.cpu.gemm.bf12_format import Bf12Format
from model_worker.cpu.gemm.int8_format import Int8Format
from model_worker.cpu.gemm.products import gated, run_product
from model_worker.cpu.gemm.weight_format import HALF, HALVES, LANE_BYTES, PANEL, WeightFormat
from model_worker.cpu.gemm.word_format import WordFormat
from model_worker.cpu.simd.dot_bf16 import TILE_ROWS
from model_worker.cpu.simd.elements import carray, pointer
from model_worker.cpu.threads import thread_pool

SCALES = PANEL * LANE_BYTES
# A step has two inputs of each output in a byte.
STEP = PANEL
FORMATS: list[type[WeightFormat]] = [WordFormat, Bf12Format, Int8Format]


@pytest.fixture(scope="module", autouse=True)
def uncached() -> Iterator[None]:
    """Keep kernels of this test's format out of the cache, where other processes would look for its class."""
    with pytest.MonkeyPatch.context() as patched:
        for kernel in vars(products).values():
            if isinstance(kernel, Dispatcher):
                patched.setattr(kernel, "_cache", NullCache())
        yield


class Nibbles(NamedTuple):
    """Panels of a scale for each output, then a byte for each output and two inputs. Sums are made in a buffer."""

    sums: NDArray[np.float32]  # [cores, PANEL], or a core's own

    def of_core(self, core: int) -> Nibbles:
        return Nibbles(self.sums[core])

    def prepare(self, operand: Any) -> None:
        self.sums[:] = 0

    def piece_rows(self) -> int:
        return 3

    def passes(self, rows: int, whole: bool) -> int:
        return 1

    def panel_at(self, operand: Any, panels: int, unit: int) -> tuple[int, int]:
        return panels + (unit // HALVES) * (SCALES + STEP * operand.shape[1] // 2), unit % HALVES * HALF

    def layout(self, operand: Any, panel: tuple[int, int]) -> tuple[int, int, int]:
        return SCALES, STEP, operand.shape[1] // 2

    def multiply(
        self, operand: Any, first: int, rows: int, panel: tuple[int, int], whole: bool, prefetching: Any, tile: Any
    ) -> None:
        place, skipped = panel
        scales = carray(pointer(place), PANEL, np.float32)
        codes = carray(pointer(place + SCALES), STEP * operand.shape[1] // 2, np.uint8)
        lanes = PANEL if whole else HALF
        for r in range(rows):
            for lane in range(lanes):
                self.sums[lane] = np.float32(0.0)
            for c in range(operand.shape[1]):
                for lane in range(lanes):
                    code = codes[(c // 2) * STEP + skipped + lane] >> (4 * (c % 2)) & 15
                    self.sums[lane] += operand[first + r, c] * np.float32(np.int64(code) - 8)
            for lane in range(lanes):
                tile[r, lane] = self.sums[lane] * scales[skipped + lane]


def packed(codes: NDArray[np.int64], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Codes from -8 to 7 as panels."""
    outputs, inputs = codes.shape
    count = -(-outputs // PANEL)
    padded = np.zeros((count * PANEL, inputs), np.uint8)
    padded[:outputs] = codes + 8
    bytes_of_two = (padded[:, ::2] | padded[:, 1::2] << 4).reshape(count, PANEL, inputs // 2).transpose(0, 2, 1)
    of_panels = np.zeros((count, PANEL), np.float32)
    of_panels.reshape(-1)[:outputs] = scales
    return np.concatenate([of_panels.view(np.uint8), bytes_of_two.reshape(count, -1)], axis=1)


@njit(nogil=True)
def both(
    operand: Any, gate: int, up: int, width: int, halves: int, out: Any, weight_format: Any, tile: Any, other: Any
) -> None:
    own = weight_format.of_core(0)
    own.prepare(operand)
    gated(0, (np.int64(0), np.int64(halves)), operand, gate, up, width, out, own, tile, other)


def rounding(terms: int) -> float:
    """The most that a sum in float32 is off, in any order, as a share of the sum of its terms' sizes."""
    return (terms + 4) * 2.0**-24


def weight(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    codes = rng.integers(-8, 8, (outputs, inputs))
    scales = (rng.random(outputs) + 0.1).astype(np.float32)
    exact = codes.astype(np.float64) * scales[:, None]
    return exact, packed(codes, scales)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(1, 300), st.integers(1, 60))
def test_a_product_takes_a_format_that_it_does_not_know(seed: int, rows: int, outputs: int, pairs: int) -> None:
    rng = np.random.default_rng(seed)
    exact, panels = weight(rng, outputs, 2 * pairs)
    operand = rng.standard_normal((rows, 2 * pairs)).astype(np.float32)
    bias = rng.standard_normal(outputs).astype(np.float32) if seed % 2 else np.empty(0, np.float32)
    out = np.empty((rows, outputs), np.float32)
    cores = 2
    weight_format = Nibbles(np.full((cores, PANEL), np.nan, np.float32))
    thread_pool(cores).run(run_product, cores, operand, panels.ctypes.data, bias, out, weight_format)
    want = operand.astype(np.float64) @ exact.T + (bias if len(bias) else 0)
    size = np.abs(operand).astype(np.float64) @ np.abs(exact).T + (np.abs(bias) if len(bias) else 0)
    assert (np.abs(out - want) <= rounding(2 * pairs) * size).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 200), st.integers(1, 40))
def test_a_gated_product_takes_it_too(seed: int, rows: int, outputs: int, pairs: int) -> None:
    rng = np.random.default_rng(seed)
    gate, gate_panels = weight(rng, outputs, 2 * pairs)
    up, up_panels = weight(rng, outputs, 2 * pairs)
    operand = (rng.standard_normal((rows, 2 * pairs)) / pairs).astype(np.float32)
    out = np.empty((rows, outputs), np.float32)
    weight_format = Nibbles(np.full((1, PANEL), np.nan, np.float32))
    tile = np.empty((TILE_ROWS, PANEL), np.float32)
    addresses = gate_panels.ctypes.data, up_panels.ctypes.data
    both(operand, *addresses, outputs, -(-outputs // HALF), out, weight_format, tile, tile.copy())
    gates = operand.astype(np.float64) @ gate.T
    ups = operand.astype(np.float64) @ up.T
    want = gates / (1 + np.exp(-gates)) * ups
    gate_error = rounding(2 * pairs) * (np.abs(operand).astype(np.float64) @ np.abs(gate).T)
    up_error = rounding(2 * pairs) * (np.abs(operand).astype(np.float64) @ np.abs(up).T)
    # SiLU is at most 1.1 times as steep as its argument, and no larger than it.
    bound = 1.1 * gate_error * (np.abs(ups) + up_error) + np.abs(gates) * up_error
    assert (np.abs(out - want) <= bound + 1e-6 * np.abs(want) + 1e-12).all()


def test_every_format_has_the_methods_that_products_ask_for() -> None:
    asked = {name for name, value in vars(WeightFormat).items() if callable(value) and not name.startswith("_")}
    assert len(asked) == 7
    for kind in FORMATS:
        assert asked <= set(vars(kind))
