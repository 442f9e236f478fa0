"""Experts on a GPU whose weights stay in FP8, or in four or eight bits, multiplied in one launch for each projection.

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
from model_worker.cuda.grouped_linear import Coding, GroupedLinear, Packed, numbers_of
from model_worker.cuda.routing import Routing, route

# The projections of a module of experts.
PROJECTIONS = ("gate_up_proj", "down_proj")


class ExpertStack(nn.Module):
    """One projection of all experts: matrices [out, in], which a module has as [experts, out, in], or transposed."""

    def __init__(self, experts: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts, self.outputs, self.inputs = experts, outputs, inputs
        self.is_transposed = False
        self._dtype = dtype

    @property
    def shape(self) -> torch.Size:
        sides = (self.inputs, self.outputs) if self.is_transposed else (self.outputs, self.inputs)
        return torch.Size((self.experts, *sides))

    @abstractmethod
    def product(self, x: Tensor, routing: Routing, bias: Tensor | None = None) -> Tensor:
        """Multiply pairs of tokens and experts, and add the bias of these, [experts, out]. Returns [pairs, out].

        `x` [T, in] are tokens, or the pairs themselves.
        """

    @abstractmethod
    def matrix(self, expert: int) -> Tensor:
        """Return the decoded weight of an expert, f32 [out, in]."""

    def __getitem__(self, expert: int) -> Tensor:
        matrix = self.matrix(int(expert)).to(self._dtype)
        return matrix.T if self.is_transposed else matrix


class GroupedExperts(ExpertStack):
    """With `codes` u8 [experts, out, bytes], `scales` and perhaps `zeros` [experts, out, groups], and perhaps an
    `order` of inputs, i32 [experts, in], as grouped_linear.py has them."""

    order: Tensor | None

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        coding: Coding,
        order: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        experts, outputs, width = codes.shape
        super().__init__(experts, outputs, coding.numbers * width, dtype)
        self.coding = coding
        self.codes = _kept(codes)
        self.scales = _kept(scales)
        self.zeros = None if zeros is None else _kept(zeros)
        self.register_buffer("order", order)

    def product(self, x: Tensor, routing: Routing, bias: Tensor | None = None) -> Tensor:
        from model_worker.cuda.grouped_experts_kernel import multiply_experts

        zeros = None if self.zeros is None else self.zeros.flatten(0, 1)
        packed = Packed(self.codes.flatten(0, 1), self.scales.flatten(0, 1), zeros, self.coding)
        return multiply_experts(x.contiguous(), packed, self.order, bias, routing, self.experts)

    def matrix(self, expert: int) -> Tensor:
        zeros, order = (None if each is None else each[expert] for each in (self.zeros, self.order))
        return GroupedLinear(self.codes[expert], self.scales[expert], zeros, self.coding, order).weight


class Fp8Experts(ExpertStack):
    """With `codes` e4m3 [experts, out, in] and `scales` f32 [experts, blocks of out, blocks of in] or [experts, out].

    Inputs are rounded to FP8 in groups of 128 either way.
    """

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        experts, outputs, inputs = codes.shape
        super().__init__(experts, outputs, inputs, dtype)
        self.codes = _kept(codes)
        self.scales = _kept(scales)

    def product(self, x: Tensor, routing: Routing, bias: Tensor | None = None) -> Tensor:
        from model_worker.cuda.fp8_block_kernel import multiply_experts

        rounded, of_groups = rounded_groups(x)
        return multiply_experts(rounded, of_groups, self.codes, self.scales, bias, routing, x.dtype)

    def matrix(self, expert: int) -> Tensor:
        codes, scales = self.codes[expert], self.scales[expert]
        one = Fp8Linear(codes, scales, None) if scales.dim() == 1 else BlockFp8Linear(codes, scales, None)
        return one.weight


def stack_of(experts: Sequence[Sequence[Any]], dtype: torch.dtype, takes_turns: bool = False) -> ExpertStack:
    """Stack layers of experts of one kind. The outputs of those of an expert come one behind the other, or take turns,
    which those in FP8 cannot. Their inputs have one order."""
    if isinstance(experts[0][0], GroupedLinear):
        grouped = [_one_of_groups(parts, takes_turns) for parts in experts]
        scales = torch.stack(_alike([one.scales for one in grouped]))
        zeros: list[Tensor] = [one.zeros for one in grouped if one.zeros is not None]
        orders: list[Tensor] = [one.order for one in grouped if one.order is not None]
        codes = torch.stack([one.codes.detach() for one in grouped])
        all_zeros, order = (torch.stack(each) if each else None for each in (zeros, orders))
        return GroupedExperts(codes, scales, all_zeros, grouped[0].coding, order, dtype)
    assert not takes_turns
    wholes = [_one_in_fp8(parts) for parts in experts]
    of_experts: list[Tensor] = [one.scales if isinstance(one, BlockFp8Linear) else one.scales[0] for one in wholes]
    return Fp8Experts(torch.stack([one.codes for one in wholes]), torch.stack(of_experts), dtype)


def _one_of_groups(parts: Sequence[GroupedLinear], takes_turns: bool) -> GroupedLinear:
    def whole(tensors: list[Tensor]) -> Tensor:
        return torch.stack(tensors, 1).flatten(0, 1) if takes_turns else torch.cat(tensors)

    zeros: list[Tensor] = [part.zeros for part in parts if part.zeros is not None]
    codes, scales = whole([part.codes for part in parts]), whole(_alike([part.scales for part in parts]))
    return GroupedLinear(codes, scales, whole(zeros) if zeros else None, parts[0].coding, parts[0].order)


def _alike(scales: list[Tensor]) -> list[Tensor]:
    """Return scales of one type: numbers, if some of them are numbers and others powers of two."""
    return scales if len({one.dtype for one in scales}) == 1 else [numbers_of(one) for one in scales]


def _one_in_fp8(parts: Sequence[Any]) -> Any:
    codes = torch.cat([part.codes for part in parts])
    if isinstance(parts[0], BlockFp8Linear):
        return BlockFp8Linear(codes, torch.cat([part.scales for part in parts]), None)
    return Fp8Linear(codes, torch.cat([part.scales[0] for part in parts]), None)


def _kept(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)


def takes(module: Any) -> bool:
    """Whether a module of experts computes gated layers without more, as `forward_of` does."""
    known = all(getattr(module, name, None) is not None for name in (*PROJECTIONS, "num_experts", "_apply_gate"))
    more = ("has_post_expert_norm", "_is_expert_parallel")
    biased = not getattr(module, "has_bias", False) or None not in (_bias(module, name) for name in PROJECTIONS)
    return known and bool(module.has_gate) and biased and not any(getattr(module, name, False) for name in more)


def _bias(module: Any, projection: str) -> Tensor | None:
    """Return what is added to a projection, [experts, out]."""
    return getattr(module, f"{projection}_bias", None) if getattr(module, "has_bias", False) else None


def put_stacks(module: Any, stacks: Sequence[ExpertStack]) -> None:
    """Put stacks in the place of a module's projections, and have it compute with them."""
    for name, stack in zip(PROJECTIONS, stacks, strict=True):
        stack.is_transposed = bool(getattr(module, "is_transposed", False))
        delattr(module, name)
        setattr(module, name, stack)
    vars(module)["forward"] = forward_of(module)


def forward_of(module: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the forward pass of a module of experts with stacks: nothing in it waits for the device."""

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        routing = route(top_k_index, module.num_experts)
        gate_and_up, down = (_bias(module, name) for name in PROJECTIONS)
        inner = module._apply_gate(module.gate_up_proj.product(hidden_states, routing, gate_and_up))
        outer = module.down_proj.product(inner, routing, down)
        weighted = outer.unflatten(0, top_k_index.shape) * top_k_weights[..., None]
        total: Tensor = weighted.sum(1)
        return total.to(hidden_states.dtype)

    return forward
