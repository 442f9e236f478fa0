"""Kinds of weights that a GPU multiplies as they are stored: in FP8, and in four bits.

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
from model_worker.cpu.gemm.weight_format import PANEL
from model_worker.cuda import experts_trial, fp8_blocks, fp8_linear, int4_trial
from model_worker.cuda.encoded_experts import ExpertStack, stack_of
from model_worker.cuda.fp8_blocks import BlockFp8Linear
from model_worker.cuda.fp8_linear import Fp8Linear
from model_worker.cuda.int4_linear import Int4Linear, Packed, pack, step_of
from shared.weight_codes import Codes

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
    def random(self, outputs: int, inputs: int, device: torch.device) -> nn.Module:
        """Return a layer of this shape with random numbers."""

    @abstractmethod
    def slower(self, device: torch.device, outputs: int, inputs: int, dtype: torch.dtype) -> str:
        """Say that products of this shape take longer than with decoded weights on a GPU; empty if not."""


class _PerOutput(Kind):
    name = "in FP8"
    rounds = True

    def layer(self, weight: EncodedWeight, bias: Tensor | None) -> nn.Module:
        return Fp8Linear(*weight.fp8(), bias)

    def unsupported(self, weights: Sequence[EncodedWeight], device: torch.device, dtype: torch.dtype) -> str:
        return fp8_linear.unsupported(device)

    def slower(self, device: torch.device, outputs: int, inputs: int, dtype: torch.dtype) -> str:
        # The product is torch's own.
        return ""

    def random(self, outputs: int, inputs: int, device: torch.device) -> nn.Module:
        codes = torch.randn(outputs, inputs, device=device).to(torch.float8_e4m3fn)
        return Fp8Linear(codes, torch.ones(outputs, device=device), None)


class _InBlocks(Kind):
    name = "in FP8"
    rounds = True

    def layer(self, weight: EncodedWeight, bias: Tensor | None) -> nn.Module:
        return BlockFp8Linear(*weight.fp8(), bias)

    def unsupported(self, weights: Sequence[EncodedWeight], device: torch.device, dtype: torch.dtype) -> str:
        return fp8_blocks.unsupported(device)

    def slower(self, device: torch.device, outputs: int, inputs: int, dtype: torch.dtype) -> str:
        return fp8_blocks.slower(device, outputs, inputs)

    def random(self, outputs: int, inputs: int, device: torch.device) -> nn.Module:
        return fp8_blocks.random_linear(outputs, inputs, device)


@dataclass(frozen=True)
class _InFourBits(Kind):
    """Codes with a scale for each group of so many inputs, and zeros, offsets or neither."""

    group: int
    zeros: bool
    offsets: bool
    middle: int  # what is taken off codes without zeros
    ordered: bool

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"in four bits with groups of {self.group}"

    def layer(self, weight: EncodedWeight, bias: Tensor | None) -> Int4Linear:
        return int4_layer(weight, bias)

    def unsupported(self, weights: Sequence[EncodedWeight], device: torch.device, dtype: torch.dtype) -> str:
        for weight in weights:
            layer = int4_layer(weight, None)
            if not torch.equal(layer.weight, weight.decoded(torch.float32)):
                return "packed weights are others"
            if reason := int4_trial.unsupported(layer, device, dtype):
                return reason
        return ""

    def slower(self, device: torch.device, outputs: int, inputs: int, dtype: torch.dtype) -> str:
        return int4_trial.slower(device, outputs, inputs, self.group, dtype)

    def random(self, outputs: int, inputs: int, device: torch.device) -> nn.Module:
        return int4_trial.random_linear(outputs, inputs, self.group, device)


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

    def random(self, outputs: int, inputs: int, device: torch.device) -> nn.Module:
        return stack_of([[self.of.random(outputs, inputs, device)]], self.dtype)

    def unsupported(self, weights: Sequence[EncodedWeight], device: torch.device, dtype: torch.dtype) -> str:
        if self.rounds and (reason := fp8_blocks.unsupported(device)):
            return reason
        for weight in weights:
            few = JoinedExperts(weight.experts[:_TRIED_EXPERTS])
            if reason := experts_trial.unsupported(self.layer(few, None), few.decoded(torch.float32), device, dtype):
                return reason
        return ""

    def slower(self, device: torch.device, outputs: int, inputs: int, dtype: torch.dtype) -> str:
        def stack(experts: int) -> ExpertStack:
            return stack_of([[self.of.random(outputs, inputs, device)] for _ in range(experts)], dtype)

        return experts_trial.slower(stack, outputs, inputs, device, dtype)


PER_OUTPUT = _PerOutput()
IN_BLOCKS = _InBlocks()


def kind_of(weight: EncodedWeight, rounds_inputs: bool, dtype: torch.dtype) -> Kind | None:
    """Return the kind that takes a matrix, or those of experts; None if none does. FP8 is for checkpoints that round
    inputs, too. Decoded numbers are of `dtype`."""
    if weight.experts and not weight.takes_turns:
        kinds = {kind_of(part, rounds_inputs, dtype) for expert in weight.experts for part in expert}
        kind = kinds.pop()
        if kinds or kind is None or (isinstance(kind, _InFourBits) and kind.ordered):
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
    return _InFourBits(group, zeros, few.minimums is not None, middle, few.order is not None)


def int4_layer(weight: EncodedWeight, bias: Tensor | None) -> Int4Linear:
    """Return a linear layer with a weight in four bits, read some outputs at a time."""
    read = weight.codes
    assert read is not None
    outputs = weight.shape[0]
    pieces = [_packed(read(first, min(first + weight.step, outputs))) for first in range(0, outputs, weight.step)]
    codes, scales = (torch.cat(parts) for parts in ([one.codes for one in pieces], [one.scales for one in pieces]))
    order = read(0, min(PANEL, outputs)).order
    columns = None if order is None else torch.from_numpy(order)
    zeros = [one.zeros for one in pieces if one.zeros is not None]
    return Int4Linear(
        codes, _narrow(scales), _narrow(torch.cat(zeros)) if zeros else None, pieces[0].middle, columns, bias
    )


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


def _narrow(values: Tensor) -> Tensor:
    """Return whole numbers as they are, and others in the least type that has them all."""
    if values.is_floating_point():
        for dtype in (torch.float16, torch.bfloat16):
            if torch.equal(values.to(dtype).float(), values):
                return values.to(dtype)
    return values
