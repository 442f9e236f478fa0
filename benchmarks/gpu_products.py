"""Products with weights that stay encoded, and those of adapters: whether they are right on this card, and their times.

Knows the kernels and their trials; does not know the hour that asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from model_worker.adapters import slots
from model_worker.cuda import experts_trial, fp8_blocks, fp8_linear, grouped_trial
from model_worker.cuda.encoded_experts import ExpertStack, stack_of
from model_worker.cuda.grouped_linear import Coding, GroupedLinear
from model_worker.cuda.routing import route

Figures = dict[str, Any]
Timed = Callable[[Callable[[], object], int], float]
_GROUPS = (32, 128)
# The numbers of MXFP4's codes, doubled.
_E2M1 = bytes(number & 0xFF for number in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
_EIGHT = f"eight bits, groups of {_GROUPS[-1]}"
_EXPERTS, _CHOSEN = 16, 4


def eight_bits(outputs: int, inputs: int, group: int, device: torch.device) -> GroupedLinear:
    """Return a layer of random codes of eight bits and scales on a device, less 128."""
    codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8, device=device)
    scales = torch.rand(outputs, inputs // group, device=device).add(0.5).half()
    return GroupedLinear(codes, scales, coding=Coding(8, 128))


def in_mxfp4(outputs: int, inputs: int, device: torch.device) -> GroupedLinear:
    """Return a layer of random codes and exponents on a device, as gpt-oss has its experts."""
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=device)
    exponents = torch.randint(119, 124, (outputs, inputs // 32), dtype=torch.uint8, device=device)
    return GroupedLinear(codes, exponents, coding=Coding(table=_E2M1))


def four_bits(outputs: int, inputs: int, group: int, device: torch.device) -> GroupedLinear:
    """Return a layer of random codes, scales and zeros on a device."""
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=device)
    groups = outputs, inputs // group
    scales = torch.rand(groups, device=device).add(0.5).half()
    return GroupedLinear(codes, scales, torch.randint(0, 16, groups, dtype=torch.int8, device=device))


def checked(device: torch.device, dtype: torch.dtype, outputs: int, inputs: int) -> Figures:
    """Compare each kind with float32: what is wrong, in words."""
    found = {"FP8": fp8_linear.unsupported(device), "FP8 in blocks": fp8_blocks.unsupported(device)}
    host = torch.device("cpu")
    for group in _GROUPS:
        linear = four_bits(outputs, inputs, group, host)
        found[f"four bits, groups of {group}"] = grouped_trial.unsupported(linear, device, dtype)
    linear = eight_bits(outputs, inputs, _GROUPS[-1], host)
    found[_EIGHT] = grouped_trial.unsupported(linear, device, dtype)
    for name, stack in _stacks(outputs, inputs, host, dtype).items():
        weight = torch.stack([stack.matrix(expert) for expert in range(_EXPERTS)])
        found[name] = experts_trial.unsupported(stack, weight, device, dtype)
    found["adapters"] = slots.unsupported(device, dtype)
    return {
        "kinds that are right": sum(not reason for reason in found.values()),
        "wrong": [f"{name}: {reason}" for name, reason in found.items() if reason],
    }


def timed(
    device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, counts: tuple[int, ...], seconds: Timed
) -> Figures:
    """Microseconds of products of so many tokens, and of those with a decoded weight."""
    linears: dict[str, nn.Module] = {
        f"four bits, groups of {group}": four_bits(outputs, inputs, group, device) for group in _GROUPS
    }
    linears[_EIGHT] = eight_bits(outputs, inputs, _GROUPS[-1], device)
    linears["FP8 in blocks"] = fp8_blocks.random_linear(outputs, inputs, device)
    plain = torch.randn(outputs, inputs, device=device, dtype=dtype)
    stacks = _stacks(outputs, inputs, device, dtype)
    found: Figures = {}
    for count in counts:
        x = torch.randn(count, inputs, device=device, dtype=dtype)
        routing = route(torch.rand(count, _EXPERTS, device=device).topk(_CHOSEN).indices, _EXPERTS)
        calls: dict[str, Callable[[], object]] = {"decoded": lambda x=x: functional.linear(x, plain)}  # type: ignore[misc]
        calls |= {name: lambda x=x, one=one: one(x) for name, one in linears.items()}  # type: ignore[misc]
        for name, stack in stacks.items():
            calls[name] = lambda x=x, r=routing, one=stack: one.product(x, r)  # type: ignore[misc]
        for name, call in calls.items():
            call()
            found[f"{name}, {count} tokens, us"] = round(seconds(call, 20 if device.type == "cuda" else 1) * 1e6, 1)
    return found


def _stacks(outputs: int, inputs: int, device: torch.device, dtype: torch.dtype) -> dict[str, ExpertStack]:
    fours = [[four_bits(outputs, inputs, 32, device)] for _ in range(_EXPERTS)]
    eights = [[fp8_blocks.random_linear(outputs, inputs, device)] for _ in range(_EXPERTS)]
    of_table = [[in_mxfp4(outputs, inputs, device)] for _ in range(_EXPERTS)]
    return {
        "experts in four bits": stack_of(fours, dtype),
        "experts in MXFP4": stack_of(of_table, dtype),
        "experts in FP8 in blocks": stack_of(eights, dtype),
    }
