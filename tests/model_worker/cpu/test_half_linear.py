"""Weights that are numbers of float16 in half the bytes: products have the bits of those with float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model_worker.cpu.gemm.half_linear import HalfLinear, are_halves, pack_halves
from model_worker.cpu.gemm.packed_linear import PackedLinear
from model_worker.cpu.simd.dot_bf16 import HAS_HALVES

pytestmark = pytest.mark.skipif(not HAS_HALVES, reason="this CPU does not widen float16")


def drawn(outputs: int, inputs: int) -> nn.Linear:
    """A linear module whose weight has numbers of float16 of all sizes, the smallest ones among them."""
    linear = nn.Linear(inputs, outputs)
    with torch.no_grad():
        sizes = torch.exp2(torch.randint(-20, 4, linear.weight.shape))
        linear.weight.copy_((torch.randn_like(linear.weight) * sizes).half().float())
    return linear


@pytest.mark.slow
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (5, 7), (100, 33), (200, 130)])
def test_products_have_the_bits_of_those_with_float32(outputs: int, inputs: int) -> None:
    linear = drawn(outputs, inputs)
    halves = HalfLinear(linear.weight, linear.bias)
    assert torch.equal(halves.weight, linear.weight)
    assert halves.num_bytes < 2 * (outputs + 64) * (inputs + 2)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13):
        x = torch.randn(rows, inputs)
        with torch.inference_mode():
            assert torch.equal(halves(x), PackedLinear(linear.weight, linear.bias).multiply(x))
            torch.testing.assert_close(halves(x), linear(x), atol=1e-4, rtol=1e-4)


def test_a_number_that_is_none_of_float16_keeps_all_weights() -> None:
    linears = [drawn(8, 9), drawn(3, 8)]
    assert are_halves(linears)
    for number in (1 + 2.0**-11, 1e-9, 70_000.0, float("nan")):
        with torch.no_grad():
            before = float(linears[1].weight[1, 1])
            linears[1].weight[1, 1] = number
            assert not are_halves(linears)
            linears[1].weight[1, 1] = before
    assert not are_halves([linears[0].to(torch.bfloat16)])


def test_modules_are_swapped_where_they_stand() -> None:
    shared = drawn(8, 8)
    model: Any = nn.ModuleDict({"one": nn.Sequential(shared, nn.ReLU()), "two": shared, "other": nn.Linear(8, 8)})
    assert pack_halves(model, [shared]) == 2 * 64
    assert isinstance(model["one"][0], HalfLinear)
    assert model["two"] is model["one"][0]
    assert type(model["other"]) is nn.Linear


def test_modules_that_would_compute_something_else_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked, replaced, wrong, right = (drawn(8, 8) for _ in range(4))
    hooked.register_forward_hook(lambda _module, _inputs, output: output + 1)
    monkeypatch.setattr(replaced, "forward", lambda x: x)
    multiply = HalfLinear.multiply

    def defective(halves: HalfLinear, x: Tensor) -> Tensor:
        product = multiply(halves, x)
        return product + 1 if torch.equal(halves.weight, wrong.weight) else product

    monkeypatch.setattr(HalfLinear, "multiply", defective)
    linears = [hooked, replaced, wrong, right]
    model = nn.Sequential(*linears)
    assert pack_halves(model, linears) == 2 * 64
    assert list(model)[:3] == linears[:3]
    assert isinstance(model[3], HalfLinear)
