"""Layers with weights of four bits for tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_worker.cuda.int4_linear import MIDDLE, ZEROS, Int4Linear, pack


def int4_layer(
    outputs: int, inputs: int, group: int, kind: int, ordered: bool = False, biased: bool = False
) -> Int4Linear:
    """Make a layer of random codes, scales and zeros."""
    groups = inputs // group
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scales = ((0.5 + torch.rand(outputs, groups)) * 0.02).half()
    zeros: Tensor | None = None
    if kind != MIDDLE:
        # GPTQ has zeros of up to sixteen.
        integers = torch.randint(0, 17, (outputs, groups), dtype=torch.int8)
        zeros = integers if kind == ZEROS else (torch.randn(outputs, groups) * 0.1).half()
    order = torch.randperm(inputs).int() if ordered else None
    bias = torch.randn(outputs) if biased else None
    return Int4Linear(pack(codes, groups), scales, zeros, 8 if kind == MIDDLE else 0, order, bias)


def in_four_bits(linear: nn.Linear) -> Int4Linear:
    """Round a plain layer's weight to codes with groups of 32 inputs, with zeros."""
    parts = linear.weight.detach().float().unflatten(1, (-1, 32))
    least, most = parts.amin(-1), parts.amax(-1)
    scales = ((most - least) / 15).half()
    zeros = (-least / scales.float()).round().clamp(0, 15)
    codes = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15).to(torch.uint8)
    return Int4Linear(pack(codes.flatten(1), scales.shape[1]), scales, zeros.to(torch.int8), bias=linear.bias)
