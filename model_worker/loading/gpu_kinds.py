"""Kinds of weights that a GPU multiplies as they are stored: in FP8, and in four or eight bits.

A kind says which weights it takes, makes a linear layer of one, and says why a card does not compute such layers as it
should. Does not know files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model_worker.cpu.gemm.encoded_linear import EncodedWeight, JoinedExperts
from model_worker.cuda import experts_trial, fp8_blocks, fp8_linear, grouped_trial
from model_worker.cuda.encoded_experts import ExpertStack, stack_of
from model_worker.cuda.fp8_blocks import BlockFp8Linear
from model_worker.cuda.fp8_linear import Fp8Linear
from model_worker.cuda.grouped_linear import GroupedLinear
from model_worker.loading.gpu_groups import Groups, groups_of, have_one_order

# Experts of a layer that are compared.
_TRIED_EXPERTS = 4


class Kind(ABC):
    """How some weights are multiplied. Those of one kind are proven together."""

    # What follows "weights" in a line of the log.
    name: str
    # Whether inputs are rounded to FP8.
    rounds: bool = False

    @abstractmethod
    def layer(self, weight: EncodedWeight, bias: Tensor | None) -> nn.Module:
        """Return a linear layer with a weight of this kind."""

    @abstractmethod
    def unsupported(self, weights: Sequence[EncodedWeight], device: torch.device, dtype: torch.dtype) -> str:
        """Say why a device does not multiply some weights of this kind as it should; empty if it does."""

    @abstractmethod
    def slower(self, weight: EncodedWeight, chosen: int, device: torch.device, dtype: torch.dtype) -> str:
        """Say that products with this weight take longer than with a decoded one on a GPU; empty if not. A token has so
        many `chosen` experts, if there are experts."""


class _PerOutput(Kind):
    name = "in FP8"
    rounds = True

    def layer(self, weight: EncodedWeight, bias: Tensor | None) -> nn.Module:
        return Fp8Linear(*weight.fp8(), bias)

    def unsupported(self, weights: Sequence[EncodedWeight], device: torch.device, dtype: torch.dtype) -> str:
        return fp8_linear.unsupported(device)

    def slower(self, weight: EncodedWeight, chosen: int, device: torch.device, dtype: torch.dtype) -> str:
        # The product is torch's own, and is not timed.
        return ""


class _InBlocks(Kind):
    name = "in FP8"
    rounds = True

    def layer(self, weight: EncodedWeight, bias: Tensor | None) -> nn.Module:
        return BlockFp8Linear(*weight.fp8(), bias)

    def unsupported(self, weights: Sequence[EncodedWeight], device: torch.device, dtype: torch.dtype) -> str:
        return fp8_blocks.unsupported(device)

    def slower(self, weight: EncodedWeight, chosen: int, device: torch.device, dtype: torch.dtype) -> str:
        outputs, inputs = weight.shape
        return fp8_blocks.slower(device, outputs, inputs, dtype)


@dataclass(frozen=True)
class _InGroups(Kind):
    """Codes with a scale for each group of inputs."""

    groups: Groups

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.groups.name

    def layer(self, weight: EncodedWeight, bias: Tensor | None) -> GroupedLinear:
        return self.groups.layer(weight, bias)

    def unsupported(self, weights: Sequence[EncodedWeight], device: torch.device, dtype: torch.dtype) -> str:
        for weight in weights:
            layer = self.layer(weight, None)
            if not torch.equal(layer.weight, weight.decoded(torch.float32)):
                return "packed weights are others"
            if reason := grouped_trial.unsupported(layer, device, dtype):
                return reason
        return ""

    def slower(self, weight: EncodedWeight, chosen: int, device: torch.device, dtype: torch.dtype) -> str:
        outputs, inputs = weight.shape
        return grouped_trial.slower(lambda: self.layer(weight, None).to(device), (outputs, inputs), device, dtype)


@dataclass(frozen=True)
class _OfExperts(Kind):
    """One projection of all experts of a layer, whose matrices are of one kind."""

    of: Kind
    dtype: torch.dtype

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"of experts {self.of.name}"

    @property
    def rounds(self) -> bool:  # type: ignore[override]
        return self.of.rounds

    def layer(self, weight: EncodedWeight, bias: Tensor | None) -> ExpertStack:
        parts = [[self.of.layer(part, None) for part in expert] for expert in weight.experts]
        return stack_of(parts, self.dtype, weight.takes_turns)

    def unsupported(self, weights: Sequence[EncodedWeight], device: torch.device, dtype: torch.dtype) -> str:
        if self.rounds and (reason := fp8_blocks.unsupported(device)):
            return reason
        for weight in weights:
            few = JoinedExperts(weight.experts[:_TRIED_EXPERTS])
            if reason := experts_trial.unsupported(self.layer(few, None), few.decoded(torch.float32), device, dtype):
                return reason
        return ""

    def slower(self, weight: EncodedWeight, chosen: int, device: torch.device, dtype: torch.dtype) -> str:
        return experts_trial.slower(lambda: self.layer(weight, None).to(device), chosen, device, dtype)


PER_OUTPUT = _PerOutput()
IN_BLOCKS = _InBlocks()


def kind_of(weight: EncodedWeight, rounds_inputs: bool, dtype: torch.dtype) -> Kind | None:
    """Return the kind that takes a matrix, or those of experts; None if none does. FP8 is for checkpoints that round
    inputs, too. Decoded numbers are of `dtype`."""
    if weight.experts:
        kind = _of_all({kind_of(part, rounds_inputs, dtype) for expert in weight.experts for part in expert})
        if kind is None or (isinstance(kind, _InGroups) and not have_one_order(weight.experts)):
            return None
        if weight.takes_turns and not isinstance(kind, _InGroups):
            return None
        # A block has outputs of one matrix.
        if kind is IN_BLOCKS and any(part.shape[0] % fp8_blocks.SIDE for part in weight.experts[0][:-1]):
            return None
        return _OfExperts(kind, dtype)
    if len(weight.shape) != 2:
        return None
    if weight.is_fp8:
        if not rounds_inputs or any(size % fp8_linear.MULTIPLE for size in weight.shape):
            return None
        if weight.fp8_block is None:
            return PER_OUTPUT
        return IN_BLOCKS if weight.fp8_block == (fp8_blocks.SIDE, fp8_blocks.SIDE) else None
    groups = groups_of(weight)
    return None if groups is None else _InGroups(groups)


def _of_all(kinds: set[Kind | None]) -> Kind | None:
    """Return the kind that takes weights of all these kinds; None if none does. Scales of unlike types are float32."""
    grouped = {kind for kind in kinds if isinstance(kind, _InGroups)}
    if len(kinds) > 1 and len(grouped) == len(kinds):
        kinds = {_InGroups(kind.groups.with_wide_numbers()) for kind in grouped}
    return kinds.pop() if len(kinds) == 1 else None
