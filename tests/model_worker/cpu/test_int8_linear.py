"""int8 linear layers compute what the naive reference computes, for every shape, on tiles, alone and in a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numpy.typing import NDArray
from torch import nn

from model_worker.cpu.gemm.int8_format import SCALE_BYTES
from model_worker.cpu.gemm.int8_linear import Int8Linear, quantize
from model_worker.cpu.gemm.packed_linear import pack_linears, quantize_linears
from model_worker.cpu.gemm.weight_format import PANEL
from model_worker.cpu.simd.dot_bf16 import TILE_ROWS
from model_worker.cpu.simd.dot_int8 import int8_rows, multiply_int8_half_panel, multiply_int8_panel
from model_worker.cpu.simd.fixed_point import (
    BASE,
    BLOCK_INPUTS,
    MOST_INPUTS,
    OFFSET,
    PLACES,
    WORD_BYTES,
    Digits,
    blocks_of,
    digits_of,
    room_for,
    split,
    width_of,
)
from tests.model_worker.cpu.int8_reference import dequantized
from tests.model_worker.cpu.test_packed_linear import Tied, difference, relative

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
shapes = st.tuples(st.integers(1, 200), st.integers(1, 200))
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
inputs = st.one_of(st.integers(1, 130), st.integers(500, 1600))


@given(shapes, st.booleans())
def test_rounding_is_the_nearest_and_keeps_zeros(shape: tuple[int, int], some_zero: bool) -> None:
    weight = torch.randn(shape) * torch.randn(shape[0], 1).exp()
    if some_zero:
        weight[torch.rand(shape[0]) < 0.3] = 0
    said = quantize(weight)
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
        layer = Int8Linear(quantize(linear.weight), linear.bias, dtype)
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
    layer = Int8Linear(quantize(weight), None, dtype)
    want = x.double() @ dequantized(weight).double().T
    try:
        for cores in (1, 2, 3):
            torch.set_num_threads(cores)
            assert layer._cores(2) == min(2, cores)
            for rows in (1, 2, 9, 30):
                assert relative(layer(x[:rows]), want[:rows]) < BOUND[dtype]
    finally:
        torch.set_num_threads(threads)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), inputs, st.sampled_from([np.uint16, np.float32]), st.floats(-25, 25))
def test_digits_say_an_operand(rows: int, inputs: int, dtype: Any, exponent: float) -> None:
    """To within half of what the last digit says, in any row; and rows that are no numbers, or zero."""
    x = (torch.randn(rows + 3, inputs) * torch.randn(rows + 3, 1).exp() * 10.0**exponent).contiguous()
    x[rows, -1], x[rows + 1, 0], x[rows + 2] = torch.inf, torch.nan, 0.0
    x = x.bfloat16() if dtype == np.uint16 else x
    array = x.view(torch.uint16).numpy() if dtype == np.uint16 else x.numpy()
    like = np.empty(1, dtype)
    room = room_for(1, len(x), x.numel() * WORD_BYTES, like)
    for left_over in room:
        left_over[:] = 77
    digits = split_by_core(array, like, room)
    count, width, blocks = digits_of(like), width_of(inputs), blocks_of(inputs)
    values = digits.values[: len(x) * count * width].reshape(len(x), count, width)
    assert not values[..., inputs:].any()
    starts = digits.starts[: len(x) * count * blocks].reshape(len(x), count, blocks)
    for block in range(blocks):
        part = values[..., block * BLOCK_INPUTS : (block + 1) * BLOCK_INPUTS]
        assert (starts[..., block] == -OFFSET * part.sum(2, dtype=np.int64)).all()
    wholes = sum(float(BASE) ** (count - 1 - digit) * values[:, digit, :inputs] for digit in range(count))
    said = wholes * digits.factors[:, None].astype(np.float64)
    exact, steps = x.double().numpy(), 2**15 if dtype == np.uint16 else 2**23
    peaks = np.abs(exact[:rows]).max(1, keepdims=True)
    assert (np.abs(said[:rows] - exact[:rows]) <= peaks * (0.51 if dtype == np.uint16 else 1.5) / steps).all()
    assert np.isnan(said[rows : rows + 2]).all()
    assert not said[rows + 2].any()


@settings(deadline=None, max_examples=30)
@given(st.integers(1, TILE_ROWS), inputs, dtypes)
def test_int8_tiles_multiply(rows: int, inputs: int, dtype: torch.dtype) -> None:
    layer = Int8Linear(quantize(torch.randn(2 * PANEL, inputs)), None, dtype)
    array, x = operand(TILE_ROWS + 2, inputs, layer)
    like = np.empty(1, array.dtype)
    digits = split_by_core(array, like, room_for(1, len(x), array.size, like))
    rows, width = min(rows, int8_rows(like)), array.shape[1]
    scales = layer.panels.ctypes.data + layer.panels.strides[0]
    place, values = scales + SCALE_BYTES, second_panel(layer)
    want = x[2 : 2 + rows].double() @ values.T
    whole, half = tile(), tile()
    multiply_int8_panel(like, digits, width, 2, rows, place, scales, nothing_early(place), whole)
    multiply_int8_half_panel(like, digits, width, 2, rows, place + 128, scales + 128, nothing_early(place), half)
    bound, part = 1e-6 if dtype == torch.float32 else 1e-4, slice(PANEL // 2, PANEL)
    assert relative(torch.from_numpy(whole[:rows]), want) < bound
    assert relative(torch.from_numpy(half[:rows, : PANEL // 2]), want[:, part]) < bound
    assert not whole[rows:].any()


@settings(deadline=None, max_examples=20)
@given(st.integers(1, TILE_ROWS), inputs)
def test_tiles_of_one_digit_multiply_what_it_says(rows: int, inputs: int) -> None:
    """The product of rounded inputs is exact; they are off by half of a 127th of their row's greatest at most."""
    layer = Int8Linear(quantize(torch.randn(2 * PANEL, inputs)), None, torch.float32)
    array, x = operand(TILE_ROWS + 2, inputs, layer)
    like = np.empty(1, np.int8)
    room = room_for(1, len(x), array.size, like)
    digits = split_by_core(array, like, room)
    assert digits_of(like) == 1
    width = width_of(array.shape[1])
    said = digits.values[: len(x) * width].reshape(len(x), width) * digits.factors[:, None].astype(np.float64)
    peaks = np.abs(x.numpy()).max(1, keepdims=True)
    assert (np.abs(said[:, : array.shape[1]] - array) <= peaks * 0.5001 / 127).all()
    rows = min(rows, int8_rows(like))
    scales = layer.panels.ctypes.data + layer.panels.strides[0]
    place, values = scales + SCALE_BYTES, second_panel(layer)
    want = torch.from_numpy(said[2 : 2 + rows, : values.shape[1]]) @ values.T
    whole, half = tile(), tile()
    multiply_int8_panel(like, digits, array.shape[1], 2, rows, place, scales, nothing_early(place), whole)
    multiply_int8_half_panel(
        like, digits, array.shape[1], 2, rows, place + 128, scales + 128, nothing_early(place), half
    )
    assert relative(torch.from_numpy(whole[:rows]), want) < 1e-6
    assert relative(torch.from_numpy(half[:rows, : PANEL // 2]), want[:, PANEL // 2 :]) < 1e-6


def test_sums_of_the_widest_product_do_not_overflow() -> None:
    layer = Int8Linear(quantize(torch.ones(1, MOST_INPUTS)), None, torch.float32)
    assert relative(layer(torch.ones(1, MOST_INPUTS)), torch.full((1, 1), float(MOST_INPUTS))) < 1e-6
    assert relative(layer(-torch.ones(1, MOST_INPUTS)), torch.full((1, 1), -float(MOST_INPUTS))) < 1e-6
    too_wide = nn.Linear(MOST_INPUTS + 1, 1)
    assert quantize_linears(nn.Sequential(too_wide)) == {}


def split_by_core(array: NDArray[Any], like: NDArray[Any], room: Digits) -> Digits:
    """As the first core does."""
    own = Digits(*(part[0] for part in room))
    _split(array, like, own)
    return own


@njit
def _split(array: Any, like: Any, own: Any) -> None:
    split(array, like, own)


def operand(rows: int, inputs: int, layer: Int8Linear) -> tuple[NDArray[Any], torch.Tensor]:
    """Random rows, as wide as the layer's panels, as the kernels and as torch sees them."""
    x = torch.zeros(rows, layer.input_width, dtype=layer.dtype)
    x[:, :inputs] = torch.randn(rows, inputs)
    return x.view(torch.uint16).numpy() if layer.dtype == torch.bfloat16 else x.numpy(), x


def nothing_early(place: int) -> tuple[int, int, int, int]:
    """Memory is asked for one place again and again; the turn, in the middle, must not lose a step."""
    return place, 0, 3, 0


def second_panel(layer: Int8Linear) -> torch.Tensor:
    """What its whole numbers say [PANEL, padded inputs]."""
    words = layer.panels[1, SCALE_BYTES:].reshape(-1, PANEL, WORD_BYTES)[..., PLACES].astype(np.float64) - OFFSET
    scales = layer.panels[1, :SCALE_BYTES].view(np.float32).astype(np.float64)
    return torch.from_numpy(words.transpose(1, 0, 2).reshape(PANEL, -1) * scales[:, None])


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
        said = quantize_linears(model)
        packed = pack_linears(model, None, said)
        got, want = model(tokens), naive(tokens)
    assert [type(layer) for layer in packed] == [Int8Linear] * 3
    assert not said
    assert model.shared is model.inner[0]
    assert torch.equal(model.embedding.weight, embedding)
    assert relative(got, want) < 2 * BOUND[dtype]


def test_int8_takes_a_byte_for_each_weight_and_a_float_for_each_output() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    assert (
        sum(layer.num_bytes for layer in pack_linears(model, None, quantize_linears(model))) == 2 * 64 * 128 + 4 * 192
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == 0


def test_weights_that_are_no_numbers_are_left_alone() -> None:
    usual, broken = nn.Linear(8, 8), nn.Linear(8, 8)
    with torch.no_grad():
        broken.weight[2, 3] = torch.nan
    assert list(quantize_linears(nn.Sequential(usual, broken))) == [usual]
