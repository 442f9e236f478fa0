"""Kinds of weights on a GPU: what tells them apart, and that what is timed is of the kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model_worker.cpu.gemm.encoded_linear import EncodedWeight, JoinedExperts
from model_worker.cuda import grouped_linear, timing
from model_worker.cuda.grouped_linear import GroupedLinear
from model_worker.loading.gpu_kinds import kind_of
from shared.weight_codes import Codes, Grouped
from tests.model_worker.cpu.coded_weights import KINDS, some

CPU = torch.device("cpu")
OUTPUTS, INPUTS = 192, 256


class Coded(EncodedWeight):
    def __init__(self, codes: Codes) -> None:
        self._codes = codes
        self.shape = (OUTPUTS, INPUTS)

    @property
    def codes(self) -> Callable[[int, int], Codes]:
        return lambda first, end: some(self._codes, first, end)

    def rows(self, first: int, last: int) -> Tensor:
        raise AssertionError("codes are enough")


def weight_of(name: str, scales: torch.dtype | None = None) -> Coded:
    codes = KINDS[name](np.random.default_rng(), OUTPUTS, INPUTS)
    if scales is not None:
        base = torch.from_numpy(codes.scales.base).to(scales).float().numpy()
        codes = codes._replace(scales=Grouped(base))
    return Coded(codes)


def kind_and_layer(weight: EncodedWeight) -> tuple[Any, GroupedLinear]:
    kind: Any = kind_of(weight, True, torch.bfloat16)
    return kind, kind.layer(weight, None)


@pytest.mark.parametrize(
    ("name", "scales", "said"),
    [
        ("Q4_0", None, "groups of 32, float16 scales, a zero of 8"),
        ("Q4_1", None, "groups of 32, float16 scales, float16 offsets, a zero of 0"),
        ("Q4_K", None, "groups of 32, float32 scales, float32 offsets, a zero of 0"),
        ("MXFP4", None, "groups of 32, scales of powers of two, a table"),
        ("IQ4_NL", None, "groups of 32, float16 scales, a table"),
        ("IQ4_XS", None, "groups of 32, float32 scales, a table"),
        ("GPTQ 4 bits", None, "groups of 128, float16 scales, zeros"),
        ("GPTQ 3 bits", None, "groups of 32, float16 scales, zeros"),
        ("bfloat16 scales", torch.bfloat16, "groups of 64, bfloat16 scales, a zero of 8"),
        ("bfloat16 scales", None, "groups of 64, float32 scales, a zero of 8"),
    ],
)
def test_a_kind_has_the_types_of_its_numbers(name: str, scales: torch.dtype | None, said: str) -> None:
    kind, layer = kind_and_layer(weight_of(name, scales))
    assert kind.name == f"in four bits with {said}"
    assert layer.scales.dtype == kind.groups.scales
    if layer.zeros is not None:
        assert layer.zeros.dtype == (kind.groups.offsets or torch.int8)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Q8_0", "groups of 32, float16 scales, a zero of 128"),
        ("Q5_0", "groups of 32, float16 scales, a zero of 16"),
        ("Q5_1", "groups of 32, float16 scales, float16 offsets, a zero of 0"),
        ("Q5_K", "groups of 32, float32 scales, float32 offsets, a zero of 0"),
        ("GPTQ 8 bits", "groups of 64, float16 scales, zeros"),
        ("whole rows", "groups of 256, float32 scales, a zero of 128"),
    ],
)
def test_codes_of_more_than_four_bits_take_eight(name: str, said: str) -> None:
    weight = weight_of(name)
    kind, layer = kind_and_layer(weight)
    assert kind.name == f"in eight bits with {said}"
    assert torch.equal(layer.weight, torch.from_numpy(weight._codes.weight))


@pytest.mark.parametrize("name", ["Q6_K", "FP8", "NF4", "groups of 16"])
def test_other_codes_are_of_no_kind(name: str) -> None:
    """Groups of 16 inputs are too few, and tables of numbers that are not whole have no place."""
    assert kind_of(weight_of(name), True, torch.bfloat16) is None


def test_powers_of_two_beyond_those_of_bytes_are_numbers() -> None:
    """The kind is told by all scales: that of the last output is too small, and its codes are not zero."""
    weight = weight_of("MXFP4")
    weight._codes.scales.base[-1] = 2.0**-127
    weight._codes.codes[-1] = 1
    kind, layer = kind_and_layer(weight)
    assert kind.groups.scales == layer.scales.dtype == torch.bfloat16
    assert torch.equal(layer.weight, torch.from_numpy(weight._codes.weight))
    # Of experts, some have numbers, and others powers of two.
    other = weight_of("MXFP4")
    parts = JoinedExperts([[weight], [other]])
    of_experts: Any = kind_of(parts, True, torch.bfloat16)
    stack = of_experts.layer(parts, None)
    assert of_experts.of.groups.scales == stack.scales.dtype == torch.float32
    for expert, part in enumerate((weight, other)):
        assert torch.equal(stack.matrix(expert), torch.from_numpy(part._codes.weight))


@pytest.mark.parametrize("output", [0, -1])
def test_groups_of_zeros_keep_powers_of_two(output: int) -> None:
    """Quantisers give them the least scale, or none. Eight is the code of a zero, too."""
    weight = weight_of("MXFP4")
    weight._codes.scales.base[output, :3] = 2.0**-127, 2.0**-128, 0
    weight._codes.codes[output, :96] = np.resize(np.array([0, 8], np.uint8), 96)
    kind, layer = kind_and_layer(weight)
    assert kind.groups.scales == layer.scales.dtype == torch.uint8
    assert torch.equal(layer.weight, torch.from_numpy(weight._codes.weight))


def test_scales_that_are_finer_than_those_of_the_kind_are_kept() -> None:
    weight = weight_of("bfloat16 scales", torch.bfloat16)
    weight._codes.scales.base[-1] = 1 / 3
    kind, layer = kind_and_layer(weight)
    assert kind.groups.scales == torch.bfloat16
    assert np.array_equal(layer.scales.numpy(), weight._codes.scales.base)


def test_experts_with_scales_of_unlike_types_have_the_widest() -> None:
    parts = [[weight_of("bfloat16 scales", dtype)] for dtype in (torch.bfloat16, torch.float16)]
    kind: Any = kind_of(JoinedExperts(parts), True, torch.bfloat16)
    assert kind.of.groups.scales == torch.float32
    stack: Any = kind.layer(JoinedExperts(parts), None)
    assert stack.scales.dtype == torch.float32


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "GPTQ 4 bits", "MXFP4"])
def test_what_is_timed_is_of_the_kind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(name)
    kind, layer = kind_and_layer(weight)
    timed: list[GroupedLinear] = []

    def product(x: Tensor, packed: Any, order: Any, bias: Any, arrived: Any) -> Tensor:
        timed.append(packed)
        return x

    monkeypatch.setattr(grouped_linear, "grouped_product", product)
    monkeypatch.setattr(timing, "milliseconds", lambda call: float(len(call())))
    assert kind.slower(weight, 1, CPU, torch.float32) == ""
    want: Any = layer.packed
    for packed in timed:
        got: Any = packed
        assert torch.equal(got.codes, want.codes)
        assert torch.equal(got.scales, want.scales)
        assert got.scales.dtype == want.scales.dtype
        assert (got.kind, got.coding) == (want.kind, want.coding)
    assert timed
