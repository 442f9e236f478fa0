"""Kinds of weights that a GPU multiplies as they are stored: in FP8, and in four bits.

A kind says which weights it takes, makes a linear layer of one, and says why a card does not compute such layers as it
should. Does not know files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from model_worker.cpu.gemm.encoded_linear import EncodedWeight, JoinedExperts
from model_worker.cpu.gemm.weight_format import PANEL
from model_worker.cuda import experts_trial, fp8_blocks, fp8_linear, int4_trial
from model_worker.cuda.encoded_experts import ExpertStack, stack_of
from model_worker.cuda.fp8_blocks import BlockFp8Linear
from model_worker.cuda.fp8_linear import Fp8Linear
from model_worker.cuda.int4_linear import Int4Linear, Packed, pack, step_of
from shared.weight_codes import Codes, Grouped

_BITS = 4
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
class _InFourBits(Kind):
    """Codes with a scale for each group of so many inputs, and zeros, offsets or neither."""

    group: int
    scales: torch.dtype
    zeros: bool
    offsets: torch.dtype | None
    middle: int  # what is taken off codes without zeros
    ordered: bool

    @property
    def name(self) -> str:  # type: ignore[override]
        parts = [f"groups of {self.group}", f"{_said(self.scales)} scales"]
        if self.offsets is not None:
            parts.append(f"{_said(self.offsets)} offsets")
        parts.append("zeros" if self.zeros else f"a zero of {self.middle}")
        if self.ordered:
            parts.append("inputs in an order")
        return f"in four bits with {', '.join(parts)}"

    def layer(self, weight: EncodedWeight, bias: Tensor | None) -> Int4Linear:
        """Return a layer whose numbers have the kind's types. Those that these do not hold stay as they are: what is
        computed is right, and is not what was timed."""
        return _int4_layer(weight, bias, self.scales, self.offsets)

    def unsupported(self, weights: Sequence[EncodedWeight], device: torch.device, dtype: torch.dtype) -> str:
        for weight in weights:
            layer = self.layer(weight, None)
            if not torch.equal(layer.weight, weight.decoded(torch.float32)):
                return "packed weights are others"
            if reason := int4_trial.unsupported(layer, device, dtype):
                return reason
        return ""

    def slower(self, weight: EncodedWeight, chosen: int, device: torch.device, dtype: torch.dtype) -> str:
        outputs, inputs = weight.shape
        return int4_trial.slower(lambda: self.layer(weight, None).to(device), (outputs, inputs), device, dtype)


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
        return stack_of([[self.of.layer(part, None) for part in expert] for expert in weight.experts], self.dtype)

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
    if weight.experts and not weight.takes_turns:
        kind = _of_all({kind_of(part, rounds_inputs, dtype) for expert in weight.experts for part in expert})
        if kind is None or (isinstance(kind, _InFourBits) and kind.ordered):
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
    return _four_bits(weight)


def _of_all(kinds: set[Kind | None]) -> Kind | None:
    """Return the kind that takes weights of all these kinds; None if none does. Scales of unlike types are float32."""
    fours = {kind for kind in kinds if isinstance(kind, _InFourBits)}
    if len(kinds) > 1 and len(fours) == len(kinds):
        wide = torch.float32
        kinds = {replace(kind, scales=wide, offsets=None if kind.offsets is None else wide) for kind in fours}
    return kinds.pop() if len(kinds) == 1 else None


def _four_bits(weight: EncodedWeight) -> _InFourBits | None:
    read = weight.codes
    if read is None:
        return None
    outputs, inputs = weight.shape
    few = read(0, min(PANEL, outputs))
    group = inputs // few.scales.groups
    has_zeros = not isinstance(few.zeros, int) or few.zeros != 0
    fits = few.bits == _BITS and few.table is None and group * few.scales.groups == inputs
    if few.minimums is not None:
        fits = fits and few.minimums.groups == few.scales.groups and not has_zeros
    if not fits or not step_of(group):
        return None
    middle = few.zeros if isinstance(few.zeros, int) else 0
    zeros = not isinstance(few.zeros, int)
    offsets = None if few.minimums is None else _type_of(few.minimums)
    return _InFourBits(group, _type_of(few.scales), zeros, offsets, middle, few.order is not None)


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _type_of(numbers: Grouped) -> torch.dtype:
    """Return the least type that holds all numbers of a weight as they are, told by some of them."""
    if numbers.steps is None and numbers.base.dtype == np.float16:
        return torch.float16
    values = torch.from_numpy(numbers.values)
    # Numbers of a file in bfloat16 are, if they are neither tiny nor large, float16, too.
    narrow = (dtype for dtype in (torch.bfloat16, torch.float16) if torch.equal(values.to(dtype).float(), values))
    return next(narrow, torch.float32)


def _int4_layer(
    weight: EncodedWeight, bias: Tensor | None, of_scales: torch.dtype, of_offsets: torch.dtype | None
) -> Int4Linear:
    """Return a linear layer with a weight in four bits, read some outputs at a time."""
    read = weight.codes
    assert read is not None
    outputs = weight.shape[0]
    pieces = [_packed(read(first, min(first + weight.step, outputs))) for first in range(0, outputs, weight.step)]
    codes, scales = (torch.cat(parts) for parts in ([one.codes for one in pieces], [one.scales for one in pieces]))
    order = read(0, min(PANEL, outputs)).order
    columns = None if order is None else torch.from_numpy(order)
    parts = [one.zeros for one in pieces if one.zeros is not None]
    zeros = torch.cat(parts) if parts else None
    if zeros is not None and of_offsets is not None:
        zeros = _narrow(zeros, of_offsets)
    return Int4Linear(codes, _narrow(scales, of_scales), zeros, pieces[0].middle, columns, bias)


def _packed(codes: Codes) -> Packed:
    """Return the tensors of a layer with these outputs."""
    scales = torch.from_numpy(codes.scales.values)
    middle = 0
    zeros: Tensor | None = None
    if codes.minimums is not None:
        zeros = torch.from_numpy(codes.minimums.values)
    elif isinstance(codes.zeros, int):
        middle = codes.zeros
    else:
        zeros = torch.from_numpy(codes.zeros).to(torch.int8)
    return Packed(pack(torch.from_numpy(codes.codes), scales.shape[1]), scales, zeros, middle)


def _narrow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in this type, if it holds them all."""
    narrow = values.to(dtype)
    return narrow if torch.equal(narrow.float(), values) else values
