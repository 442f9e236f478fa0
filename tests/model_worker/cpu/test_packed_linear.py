"""Packed linear layers compute what the plain ones compute, and their memory has the order that kernels expect."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from model_worker.cpu.gemm.encoded_linear import EncodedLinear, QuantizedWeight
from model_worker.cpu.gemm.int8_linear import quantize
from model_worker.cpu.gemm.packed_linear import PackedLinear, pack_linears
from model_worker.cpu.gemm.weight_format import PANEL

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
shapes = st.tuples(st.integers(1, 200), st.integers(1, 200))
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def random_linear(outputs: int, inputs: int, dtype: torch.dtype, bias: bool) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias).to(dtype)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def difference(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor) -> float:
    """Of sums whose terms add up to `size` without their signs: little may be left of them where they cancel out."""
    return float((got.double() - want.double()).norm() / size.norm())


@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(1, 70), dtypes, st.booleans(), st.booleans())
def test_equals_the_module_it_replaces(
    shape: tuple[int, int], rows: int, dtype: torch.dtype, bias: bool, without_onednn: bool
) -> None:
    linear = random_linear(*shape, dtype, bias)
    packed = packed_linear(linear, without_onednn)
    x = torch.randn(1, rows, shape[1]).to(dtype)
    with torch.inference_mode():
        got, want = packed(x), linear(x)
        terms = [x.double(), linear.weight.double(), *([linear.bias.double()] if bias else [])]
        truth, size = nn.functional.linear(*terms), nn.functional.linear(*(term.abs() for term in terms))
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert difference(got, want, size) < BOUND[dtype]
    assert difference(got, truth, size) < max(1.5 * difference(want, truth, size), 1e-6)
    assert torch.equal(packed.weight, linear.weight)


@settings(deadline=None, max_examples=60)
@given(shapes, dtypes, st.booleans())
def test_panels_are_the_weight_in_another_order(
    shape: tuple[int, int], dtype: torch.dtype, without_onednn: bool
) -> None:
    linear = random_linear(*shape, dtype, bias=False)
    packed = packed_linear(linear, without_onednn)
    panels = packed.panels
    assert panels.nbytes == packed.num_bytes
    elements = panels.view(np.uint16 if dtype == torch.bfloat16 else np.uint32)
    per_word = elements.shape[2] // PANEL
    unpacked = elements.reshape(len(panels), -1, PANEL, per_word).transpose(0, 2, 1, 3).reshape(len(panels) * PANEL, -1)
    plain = linear.weight.detach().view(torch.uint16 if dtype == torch.bfloat16 else torch.uint32).numpy()
    assert np.array_equal(unpacked[: shape[0], : shape[1]], plain)
    assert not unpacked[shape[0] :].any()
    assert not unpacked[:, shape[1] :].any()


def packed_linear(linear: nn.Linear, without_onednn: bool) -> PackedLinear:
    """Also as on processors for which oneDNN packs nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if without_onednn:
            patch.setattr("model_worker.cpu.gemm.packed_linear._onednn_packs", lambda dtype: False)
        return PackedLinear(linear.weight, linear.bias)


class Tied(nn.Module):
    """An embedding whose weight is also that of the head, a linear module used twice, and one with a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(70, 40)
        self.inner = nn.Sequential(nn.Linear(40, 40), nn.SiLU(), nn.Linear(40, 40, bias=False))
        self.shared = self.inner[0]
        self.hooked = nn.Linear(40, 40)
        self.hooked.register_forward_hook(lambda module, args, out: out + 1)
        self.head = nn.Linear(40, 70, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.hooked(self.shared(self.inner(self.embedding(tokens)))))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swaps_what_it_can_and_leaves_the_rest(dtype: torch.dtype) -> None:
    model = Tied().to(dtype).eval()
    tokens = torch.randint(0, 70, (1, 9))
    calls: list[tuple[int, int]] = []
    with torch.inference_mode():
        want = model(tokens)
        swapped = pack_linears(model, lambda done, total: calls.append((done, total)))
        got = model(tokens)
    assert [type(layer) for layer in swapped] == [PackedLinear] * 3
    assert calls == [(i, 4) for i in range(1, 5)]
    assert model.shared is model.inner[0]
    assert type(model.hooked) is nn.Linear
    assert model.embedding.weight.shape == (70, 40)
    assert relative(got, want) < 2 * BOUND[dtype]


def test_a_weight_that_is_packed_is_not_kept_in_its_plain_order() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    pack_linears(model)
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    assert sum(layer.num_bytes for layer in model.modules() if isinstance(layer, PackedLinear)) == 2 * 64 * 128 * 4


def test_encoded_weights_leave_memory_one_after_another() -> None:
    sources = [QuantizedWeight(quantize(torch.randn(32, 48))) for _ in range(3)]
    model = nn.Sequential(*(EncodedLinear(source, None, torch.float32) for source in sources))
    kept = [weakref.ref(source) for source in sources]
    sources.clear()
    left: list[int] = []
    pack_linears(model, lambda done, _: left.append(sum(source() is not None for source in kept)))
    assert left == [2, 1, 0]
