"""int8 linear layers compute what the naive reference computes, for every shape, on tiles, alone and in a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from model_worker.fusion.int8_tile import (
    INT8_ROWS,
    multiply_and_keep,
    multiply_int8_half_panel,
    multiply_int8_panel,
)
from model_worker.fusion.products import PANEL, SCALE_BYTES
from model_worker.fusion.tile import TILE_ROWS, multiply_half_panel, multiply_panel
from model_worker.int8_linear import Int8Linear, rounded
from model_worker.linears import pack_linears, round_linears
from tests.model_worker.int8_reference import dequantized
from tests.model_worker.test_linears import Tied, difference, relative

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
shapes = st.tuples(st.integers(1, 200), st.integers(1, 200))
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@given(shapes, st.booleans())
def test_rounding_is_the_nearest_and_keeps_zeros(shape: tuple[int, int], some_zero: bool) -> None:
    weight = torch.randn(shape) * torch.randn(shape[0], 1).exp()
    if some_zero:
        weight[torch.rand(shape[0]) < 0.3] = 0
    said = rounded(weight)
    assert said.values.dtype == torch.int8
    assert int(said.values.min()) >= -127
    assert ((said.weight - weight).abs() <= said.scales[:, None] * 0.5001).all()
    assert torch.equal(said.weight == 0, (weight.abs() <= said.scales[:, None] / 2))
    assert torch.equal(said.weight, dequantized(weight))


@settings(max_examples=60)
@given(shapes, st.integers(0, 70), dtypes, st.booleans())
def test_equals_the_naive_reference(shape: tuple[int, int], rows: int, dtype: torch.dtype, bias: bool) -> None:
    linear = nn.Linear(shape[1], shape[0], bias=bias).to(dtype)
    x = torch.randn(1, rows, shape[1]).to(dtype)
    with torch.inference_mode():
        layer = Int8Linear(rounded(linear.weight), linear.bias, dtype)
        got = layer(x)
        terms = [x.double(), dequantized(linear.weight).double(), *([linear.bias.double()] if bias else [])]
        want, size = nn.functional.linear(*terms), nn.functional.linear(*(term.abs() for term in terms))
    assert got.shape == want.shape
    assert got.dtype == dtype
    assert rows == 0 or difference(got, want, size) < BOUND[dtype]
    assert torch.equal(layer.weight, dequantized(linear.weight).to(dtype))


@pytest.mark.parametrize("dtype", BOUND)
def test_cores_share_the_work(dtype: torch.dtype) -> None:
    """Large enough that no core does it alone; odd numbers of half panels are split in the middle of one."""
    threads = torch.get_num_threads()
    weight, x = torch.randn(1100, 2003), torch.randn(30, 2003).to(dtype)
    layer = Int8Linear(rounded(weight), None, dtype)
    want = x.double() @ dequantized(weight).double().T
    try:
        for cores in (1, 2, 3):
            torch.set_num_threads(cores)
            assert layer._cores(2) == min(2, cores)
            for rows in (1, 2, 9, 30):
                assert relative(layer(x[:rows]), want[:rows]) < BOUND[dtype]
    finally:
        torch.set_num_threads(threads)


@settings(max_examples=30)
@given(st.integers(1, INT8_ROWS), st.integers(1, 130), dtypes)
def test_int8_tiles_multiply(rows: int, inputs: int, dtype: torch.dtype) -> None:
    layer = Int8Linear(rounded(torch.randn(2 * PANEL, inputs)), None, dtype)
    array, x = operand(INT8_ROWS + 3, inputs, layer)
    place, values = layer.panels.ctypes.data + layer.panels.strides[0] + SCALE_BYTES, second_panel(layer)
    want = x[2 : 2 + rows].double() @ values.T
    whole, half, room = tile(), tile(), np.zeros((array.shape[1] * array.itemsize // 4, PANEL), np.uint32)
    multiply_int8_panel(array, 2, rows, place, nothing_early(place), room, whole)
    multiply_int8_half_panel(array, 2, rows, place + PANEL, nothing_early(place), room, half)
    assert relative(torch.from_numpy(whole[:rows]), want) < 1e-5
    assert np.allclose(half[:rows, : PANEL // 2], whole[:rows, PANEL // 2 :], rtol=1e-5, atol=1e-3)
    assert not whole[rows:].any()
    assert not room.any()


@settings(max_examples=30)
@given(st.integers(1, 130), dtypes)
def test_a_kept_panel_multiplies_other_rows(inputs: int, dtype: torch.dtype) -> None:
    layer = Int8Linear(rounded(torch.randn(2 * PANEL, inputs)), None, dtype)
    array, x = operand(INT8_ROWS + TILE_ROWS, inputs, layer)
    place, values = layer.panels.ctypes.data + layer.panels.strides[0] + SCALE_BYTES, second_panel(layer)
    want = x.double() @ values.T
    first, rest, room = tile(), tile(), np.empty((array.shape[1] * array.itemsize // 4, PANEL), np.uint32)
    multiply_and_keep(array, place, True, nothing_early(place), room, first)
    multiply_panel(array, INT8_ROWS, TILE_ROWS, room.ctypes.data, nothing_early(place), rest)
    assert relative(torch.from_numpy(np.concatenate([first[:INT8_ROWS], rest])), want) < 1e-5
    multiply_and_keep(array, place + PANEL, False, nothing_early(place), room, first)
    multiply_half_panel(array, INT8_ROWS, TILE_ROWS, room.ctypes.data, nothing_early(place), rest)
    halves = np.concatenate([first[:INT8_ROWS], rest])[:, : PANEL // 2]
    assert relative(torch.from_numpy(halves), want[:, PANEL // 2 :]) < 1e-5


def operand(rows: int, inputs: int, layer: Int8Linear) -> tuple[NDArray[Any], torch.Tensor]:
    """Random rows, as wide as the layer's panels, as the kernels and as torch sees them."""
    x = torch.zeros(rows, layer.input_width, dtype=layer.dtype)
    x[:, :inputs] = torch.randn(rows, inputs)
    return x.view(torch.uint16).numpy() if layer.dtype == torch.bfloat16 else x.numpy(), x


def nothing_early(place: int) -> tuple[int, int, int, int]:
    """Memory is asked for one place again and again; the turn, in the middle, must not lose a step."""
    return place, 0, 3, 0


def second_panel(layer: Int8Linear) -> torch.Tensor:
    """Its whole numbers [PANEL, padded inputs]."""
    lines = torch.from_numpy(layer.panels[1, SCALE_BYTES:].view(np.int8)).reshape(-1, 2, 4, 2, 4, 2)
    return lines.permute(1, 3, 2, 4, 0, 5).reshape(PANEL, -1).double()


def tile() -> NDArray[np.float32]:
    return np.zeros((TILE_ROWS, PANEL), np.float32)


@pytest.mark.parametrize("dtype", BOUND)
def test_a_model_gets_int8_layers_and_keeps_its_embedding(dtype: torch.dtype) -> None:
    model: Any = Tied().to(dtype).eval()
    naive: Any = Tied().to(dtype).eval()
    naive.load_state_dict(model.state_dict())
    naive.float()
    for module in (naive.inner[0], naive.inner[2], naive.head):
        module.weight = nn.Parameter(dequantized(module.weight), requires_grad=False)
    tokens, embedding = torch.randint(0, 70, (1, 9)), model.embedding.weight.detach().clone()
    with torch.inference_mode():
        said = round_linears(model)
        packed = pack_linears(model, None, said)
        got, want = model(tokens), naive(tokens)
    assert [type(layer) for layer in packed] == [Int8Linear] * 3
    assert not said
    assert model.shared is model.inner[0]
    assert torch.equal(model.embedding.weight, embedding)
    assert relative(got, want) < 2 * BOUND[dtype]


def test_int8_takes_a_byte_for_each_weight_and_a_float_for_each_output() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    assert sum(layer.num_bytes for layer in pack_linears(model, None, round_linears(model))) == 2 * 64 * 128 + 4 * 192
    assert sum(parameter.numel() for parameter in model.parameters()) == 0


def test_weights_that_are_no_numbers_are_left_alone() -> None:
    usual, broken = nn.Linear(8, 8), nn.Linear(8, 8)
    with torch.no_grad():
        broken.weight[2, 3] = torch.nan
    assert list(round_linears(nn.Sequential(usual, broken))) == [usual]
