"""Layers with weights of four and eight bits for tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_worker.cuda.grouped_linear import MIDDLE, TABLE, ZEROS, Coding, GroupedLinear, pack

# The numbers of IQ4_NL's codes, and of MXFP4's, doubled.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def grouped_layer(
    outputs: int, inputs: int, group: int, kind: int, ordered: bool = False, biased: bool = False, bits: int = 4
) -> GroupedLinear:
    """Make a layer of random codes, scales and zeros, or MXFP4's table."""
    groups = inputs // group
    codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    if kind == TABLE:
        return in_table(pack(codes, groups), torch.randint(119, 123, (outputs, groups), dtype=torch.uint8), E2M1)
    scales = ((0.5 + torch.rand(outputs, groups)) * 0.02).half()
    zeros: Tensor | None = None
    if kind != MIDDLE:
        # GPTQ has zeros of up to sixteen.
        of_zeros = torch.int8 if bits == 4 else torch.int16
        integers = torch.randint(0, (1 << bits) + 1, (outputs, groups), dtype=of_zeros)
        zeros = integers if kind == ZEROS else (torch.randn(outputs, groups) * 0.1).half()
    order = torch.randperm(inputs).int() if ordered else None
    bias = torch.randn(outputs) if biased else None
    coding = Coding(bits, 1 << (bits - 1) if kind == MIDDLE else 0)
    return GroupedLinear(pack(codes, groups) if bits == 4 else codes, scales, zeros, coding, order, bias)


def in_table(packed: Tensor, scales: Tensor, numbers: tuple[int, ...]) -> GroupedLinear:
    return GroupedLinear(packed, scales, coding=Coding(table=bytes(number & 0xFF for number in numbers)))


def in_four_bits(linear: nn.Linear) -> GroupedLinear:
    """Round a plain layer's weight to codes with groups of 32 inputs, with zeros."""
    parts = linear.weight.detach().float().unflatten(1, (-1, 32))
    least, most = parts.amin(-1), parts.amax(-1)
    scales = ((most - least) / 15).half()
    zeros = (-least / scales.float()).round().clamp(0, 15)
    codes = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15).to(torch.uint8)
    return GroupedLinear(pack(codes.flatten(1), scales.shape[1]), scales, zeros.to(torch.int8), bias=linear.bias)
