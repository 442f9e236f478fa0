"""Weights in twelve bits are the weights, and products with them are the same to the last bit."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from model_worker.cpu.fused import stack
from model_worker.cpu.fused.stack import FusedStack
from model_worker.cpu.gemm.bf12_format import Bf12Format
from model_worker.cpu.gemm.packed_linear import PackedLinear, _panels
from model_worker.cpu.gemm.products import add_product
from model_worker.cpu.gemm.weight_format import PANEL
from model_worker.cpu.simd.bf12 import (
    BF12_STEP_BYTES,
    GROUP_BYTES,
    HAS_BF12,
    HEADER_BYTES,
    LOWER_BYTES,
    NUMBERS_ADDRESS,
    UPPER_BYTES,
    WORDS_ADDRESS,
    Bf12Panels,
    bf12_panels,
)
from model_worker.cpu.simd.dot_bf16 import TILE_ROWS
from model_worker.runner import ModelRunner
from tests.model_worker.cpu.test_fused_stack import FUSED, batches, load

needs_instructions = pytest.mark.skipif(not HAS_BF12, reason="this processor multiplies no bf12 panels")
SEEDS = st.integers(0, 2**32 - 1)


def _any_bits(rng: np.random.Generator, shape: tuple[int, int]) -> Tensor:
    return torch.from_numpy(rng.integers(0, 1 << 16, shape).astype(np.uint16)).view(torch.bfloat16)


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).bfloat16()


def _with_outliers(rng: np.random.Generator, shape: tuple[int, int]) -> Tensor:
    return torch.from_numpy(rng.standard_cauchy(shape)).bfloat16()


def _often_zero(rng: np.random.Generator, shape: tuple[int, int]) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape) * rng.integers(0, 2, shape)).bfloat16()


def _tiny(rng: np.random.Generator, shape: tuple[int, int]) -> Tensor:
    """Some of them have no exponent any more."""
    return torch.from_numpy(rng.standard_normal(shape) * 1e-38).bfloat16()


WEIGHTS = st.sampled_from([_any_bits, _normal, _with_outliers, _often_zero, _tiny])


def _memory(address: int, count: int, kind: Any) -> NDArray[Any]:
    return np.ctypeslib.as_array((kind * count).from_address(address))


def _said(compact: Bf12Panels, steps: int) -> NDArray[np.uint32]:
    """What panels say, read as their description says, one number at a time."""
    words = np.empty((len(compact.panels), steps, PANEL), np.uint32)
    for panel, memory in zip(words, compact.panels, strict=True):
        numbers, kept = memory[NUMBERS_ADDRESS : WORDS_ADDRESS + 8].view(np.int64).tolist()
        exceptions: list[int] = []
        while (number := int(_memory(numbers, len(exceptions) + 1, ctypes.c_int32)[-1])) < steps:
            exceptions.append(number)
        for step in range(steps):
            if step in exceptions:
                panel[step] = _memory(kept, PANEL * len(exceptions), ctypes.c_uint32).reshape(-1, PANEL)[
                    exceptions.index(step)
                ]
                continue
            line = memory[HEADER_BYTES + step * BF12_STEP_BYTES :][:BF12_STEP_BYTES]
            values = np.empty(2 * PANEL, np.uint32)
            for place in range(GROUP_BYTES):
                lane, within = divmod(place, 16)
                for group in range(2):
                    code = int(line[2 * GROUP_BYTES + place]) >> (4 * group) & 15
                    byte = int(line[group * GROUP_BYTES + place])
                    upper = byte & 0x80 | int(memory[UPPER_BYTES + code])
                    lower = byte & 0x7F | int(memory[LOWER_BYTES + code])
                    vector = 2 * group + within // 8
                    values[32 * vector + 8 * lane + within % 8] = upper << 8 | lower
            panel[step] = values[::2] | values[1::2] << 16
    return words


@settings(max_examples=30, deadline=None)
@given(SEEDS, WEIGHTS, st.integers(1, 150), st.integers(1, 40))
def test_they_say_every_bit(seed: int, weights: Any, outputs: int, inputs: int) -> None:
    words = _panels(weights(np.random.default_rng(seed), (outputs, inputs)))
    (compact,) = bf12_panels([words])
    assert np.array_equal(_said(compact, words.shape[1]), words)


def test_those_of_models_take_three_quarters() -> None:
    words = _panels(_normal(np.random.default_rng(), (640, 1024)) * 0.02)
    (compact,) = bf12_panels([words])
    assert 0.75 * words.nbytes < compact.num_bytes < 0.8 * words.nbytes
    assert compact.panels.ctypes.data % GROUP_BYTES == 0


@settings(max_examples=30, deadline=None)
@given(SEEDS, WEIGHTS, st.integers(1, 150), st.integers(1, 40))
def test_none_are_made_that_would_take_too_much(seed: int, weights: Any, outputs: int, inputs: int) -> None:
    words = _panels(weights(np.random.default_rng(seed), (outputs, inputs)))
    taken = sum(matrix.num_bytes for matrix in bf12_panels([words, words]))
    assert len(bf12_panels([words, words], taken)) == 2
    assert bf12_panels([words, words], taken - 1) == []


@njit(nogil=True)
def _product(
    core: int, taken: Any, operand: Any, panels: int, width: int, out: Any, biases: Any, weight_format: Any, tile: Any
) -> None:
    weight_format.prepare(operand)
    add_product(core, taken, operand, panels, width, out, 0, biases, -1, weight_format, tile)


@needs_instructions
@settings(max_examples=60, deadline=None)
@given(SEEDS, WEIGHTS, st.integers(1, stack.BF12_ROWS), st.integers(1, 300), st.integers(1, 200), st.data())
def test_products_are_the_same_to_the_last_bit(
    seed: int, weights: Any, rows: int, outputs: int, inputs: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    words = _panels(weights(rng, (outputs, inputs)))
    (compact,) = bf12_panels([words])
    operand = np.zeros((rows, 2 * words.shape[1]), np.uint16)
    operand[:, :inputs] = _normal(rng, (rows, inputs)).view(torch.uint16).numpy()
    halves = -(-outputs // (PANEL // 2))
    first = data.draw(st.integers(0, halves - 1))
    taken, core = (first, data.draw(st.integers(1, halves - first))), data.draw(st.integers(0, 1))
    got: list[NDArray[np.float32]] = []
    for panels, is_compact in ((words, False), (compact.panels, True)):
        out = np.zeros((rows, outputs), np.float32)
        weight_format = Bf12Format(np.empty(1, np.uint16), is_compact)
        tile = np.empty((TILE_ROWS, PANEL), np.float32)
        address = int(panels.ctypes.data)
        _product(core, taken, operand, address, outputs, out, np.empty((1, 0), np.float32), weight_format, tile)
        got.append(out)
    assert np.array_equal(got[0], got[1], equal_nan=True)


@needs_instructions
@pytest.mark.parametrize("arch", FUSED)
def test_a_stack_gives_the_same_logits(
    arch: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, folder = np.random.default_rng(), tmp_path_factory.getbasetemp()
    plain = _runner(arch, folder, False, monkeypatch)
    compact = _runner(arch, folder, True, monkeypatch)
    few = 0
    for _ in range(6):
        for step in batches(rng, 16, 32):
            assert torch.equal(compact.backend.logits(step), plain.backend.logits(step))
            few += step.num_tokens <= stack.BF12_ROWS
    assert few


def _runner(arch: str, folder: Path, uses_bf12: bool, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setattr(stack, "WORTH_BF12", 0 if uses_bf12 else 1 << 40)
    loaded = load(arch, "bfloat16", folder)
    runner = ModelRunner(loaded, 32, 16)
    runner.warm_up()
    assert isinstance(loaded.stack, FusedStack)
    loaded.stack.wait_for_copies()
    assert loaded.stack.uses_bf12 == uses_bf12
    return runner


@needs_instructions
def test_weights_that_lie_far_apart_are_read_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load("llama", "bfloat16", tmp_path_factory.getbasetemp())
    made = FusedStack(loaded)
    linears = [module for module in loaded.model.modules() if isinstance(module, PackedLinear)]
    for linear in linears:
        linear.panels[...] = np.random.default_rng().integers(0, 1 << 32, linear.panels.shape, np.uint32)
    with caplog.at_level(logging.INFO, "model_worker.cpu.fused.stack"):
        made._make_bf12()
    assert linears
    assert not made.uses_bf12
    assert "lie apart" in caplog.text


def test_a_copy_takes_a_small_part_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "free_memory", lambda: 8 << 30)
    assert stack.has_room_for_bf12(1 << 30)
    assert not stack.has_room_for_bf12(2 << 30)
