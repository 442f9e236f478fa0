"""Experts on a GPU whose weights stay in FP8 or in four bits, multiplied in one launch for each projection.

Stacks stand in the place of the tensors that transformers' modules of experts have. Knows the contract of these
modules. Knows no format of files.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model_worker.cuda.fp8_blocks import BlockFp8Linear, rounded_groups
from model_worker.cuda.fp8_linear import Fp8Linear
from model_worker.cuda.int4_linear import Int4Linear, Packed
from model_worker.cuda.routing import Routing, route

# The projections of a module of experts.
PROJECTIONS = ("gate_up_proj", "down_proj")


class ExpertStack(nn.Module):
    """One projection of all experts, [experts, out, in]."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = torch.Size(shape)
        self._dtype = dtype

    @abstractmethod
    def product(self, x: Tensor, routing: Routing) -> Tensor:
        """Multiply pairs of tokens and experts, [pairs, out]. `x` [T, in] are tokens, or the pairs themselves."""

    @abstractmethod
    def matrix(self, expert: int) -> Tensor:
        """Return the decoded weight of an expert, f32 [out, in]."""

    def __getitem__(self, expert: int) -> Tensor:
        return self.matrix(int(expert)).to(self._dtype)


class Int4Experts(ExpertStack):
    """With `codes` u8 [experts, out, in / 2], `scales` and perhaps `zeros` [experts, out, groups] (int4_linear.py)."""

    def __init__(self, experts: Sequence[Int4Linear], dtype: torch.dtype) -> None:
        first = experts[0]
        super().__init__((len(experts), first.out_features, first.in_features), dtype)
        self._middle = first.middle
        self.codes = _stack([one.codes for one in experts])
        self.scales = _stack([one.scales for one in experts])
        self.zeros = None if first.zeros is None else _stack([one.get_parameter("zeros") for one in experts])

    def product(self, x: Tensor, routing: Routing) -> Tensor:
        from model_worker.cuda.int4_kernel import multiply_experts

        zeros = None if self.zeros is None else self.zeros.flatten(0, 1)
        packed = Packed(self.codes.flatten(0, 1), self.scales.flatten(0, 1), zeros, self._middle)
        return multiply_experts(x.contiguous(), packed, routing, self.shape[0])

    def matrix(self, expert: int) -> Tensor:
        zeros = None if self.zeros is None else self.zeros[expert]
        return Int4Linear(self.codes[expert], self.scales[expert], zeros, self._middle).weight


class Fp8Experts(ExpertStack):
    """With `codes` e4m3 [experts, out, in] and `scales` f32 [experts, blocks of out, blocks of in] or [experts, out].

    Inputs are rounded to FP8 in groups of 128 either way.
    """

    def __init__(self, experts: Sequence[Fp8Linear] | Sequence[BlockFp8Linear], dtype: torch.dtype) -> None:
        super().__init__((len(experts), *experts[0].codes.shape), dtype)
        self.codes = _stack([one.codes for one in experts])
        self.scales = _stack([one.scales if isinstance(one, BlockFp8Linear) else one.scales[0] for one in experts])

    def product(self, x: Tensor, routing: Routing) -> Tensor:
        from model_worker.cuda.fp8_block_kernel import multiply_experts

        rounded, of_groups = rounded_groups(x)
        return multiply_experts(rounded, of_groups, self.codes, self.scales, routing, x.dtype)

    def matrix(self, expert: int) -> Tensor:
        codes, scales = self.codes[expert], self.scales[expert]
        one = Fp8Linear(codes, scales, None) if scales.dim() == 1 else BlockFp8Linear(codes, scales, None)
        return one.weight


def stack_of(experts: Sequence[Sequence[Any]], dtype: torch.dtype) -> ExpertStack:
    """Stack layers of experts of one kind. The outputs of those of an expert come one behind the other."""
    if isinstance(experts[0][0], Int4Linear):
        return Int4Experts([_one_in_four_bits(parts) for parts in experts], dtype)
    return Fp8Experts([_one_in_fp8(parts) for parts in experts], dtype)


def _one_in_four_bits(parts: Sequence[Int4Linear]) -> Int4Linear:
    zeros: list[Tensor] = [part.zeros for part in parts if part.zeros is not None]
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    return Int4Linear(codes, scales, torch.cat(zeros) if zeros else None, parts[0].middle)


def _one_in_fp8(parts: Sequence[Any]) -> Any:
    codes = torch.cat([part.codes for part in parts])
    if isinstance(parts[0], BlockFp8Linear):
        return BlockFp8Linear(codes, torch.cat([part.scales for part in parts]), None)
    return Fp8Linear(codes, torch.cat([part.scales[0] for part in parts]), None)


def _stack(tensors: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.stack([tensor.detach() for tensor in tensors]), requires_grad=False)


def takes(module: Any) -> bool:
    """Whether a module of experts computes gated layers without more, as `forward_of` does."""
    known = all(getattr(module, name, None) is not None for name in (*PROJECTIONS, "num_experts", "_apply_gate"))
    more = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
    return known and bool(module.has_gate) and not any(getattr(module, name, False) for name in more)


def put_stacks(module: Any, stacks: Sequence[ExpertStack]) -> None:
    """Put stacks in the place of a module's projections, and have it compute with them."""
    for name, stack in zip(PROJECTIONS, stacks, strict=True):
        delattr(module, name)
        setattr(module, name, stack)
    vars(module)["forward"] = forward_of(module)


def forward_of(module: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the forward pass of a module of experts with stacks: nothing in it waits for the device."""

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        routing = route(top_k_index, module.num_experts)
        inner = module._apply_gate(module.gate_up_proj.product(hidden_states, routing))
        outer = module.down_proj.product(inner, routing)
        weighted = outer.unflatten(0, top_k_index.shape) * top_k_weights[..., None]
        total: Tensor = weighted.sum(1)
        return total.to(hidden_states.dtype)

    return forward
