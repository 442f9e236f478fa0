"""Weights that stay in their file's own encoding until panels are made of them, and linear layers that have such ones.

A format of files gives an `EncodedWeight`, which decodes some outputs at a time. Models of such layers can run before
they are packed, slowly and in little memory. Knows no format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from model_worker.cpu.gemm.int8_linear import Quantized, quantize
from model_worker.cpu.gemm.weight_format import PANEL
from shared.weight_codes import Codes

# Numbers that are decoded at a time: 16 MB of float32.
_PIECE = 1 << 22


class Fp8Numbers(NamedTuple):
    """A weight as `values` e4m3 [out, in], with a scale for each output, f32 [out], or for each block, f32 [blocks of
    out, blocks of in]."""

    values: Tensor
    scales: Tensor


class EncodedWeight(ABC):
    """A weight that is decoded in pieces along its first dimension: outputs of a matrix, or experts."""

    shape: tuple[int, ...]

    @abstractmethod
    def rows(self, first: int, last: int) -> Tensor:
        """Decode these rows to float32, [last - first, *shape[1:]]. `first` is a multiple of PANEL in a matrix."""

    @property
    def step(self) -> int:
        """Rows to decode at a time: whole panels of a matrix."""
        if len(self.shape) > 2:
            return 1
        return max(1, _PIECE // max(1, self.shape[-1]) // PANEL) * PANEL

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Decode the whole weight, piece by piece."""
        weight = torch.empty(self.shape, dtype=dtype)
        for first in range(0, self.shape[0], self.step):
            last = min(first + self.step, self.shape[0])
            weight[first:last] = self.rows(first, last)
        return weight

    @property
    def codes(self) -> Callable[[int, int], Codes] | None:
        """What gives the codes of outputs from the first number up to the second; None: panels hold no such codes."""
        return None

    def code_scales(self, first: int, last: int) -> NDArray[np.float32]:
        """Return the scales of `codes` of these outputs, [outputs, groups]. A format whose scales lie apart from codes
        reads no codes."""
        assert self.codes is not None
        return self.codes(first, last).scales.values

    @property
    def experts(self) -> Sequence[Sequence[EncodedWeight]]:
        """The matrices [outputs, inputs] of each expert, whose outputs come one behind the other, or take turns;
        empty for none."""
        return ()

    @property
    def takes_turns(self) -> bool:
        """Whether the outputs of an expert's matrices take turns, instead of being one behind the other."""
        return False

    @property
    def is_fp8(self) -> bool:
        """Whether `fp8` gives its numbers."""
        return False

    @property
    def fp8_block(self) -> tuple[int, int] | None:
        """The outputs and inputs that share a scale of `fp8`; None: each output has one."""
        return None

    def fp8(self) -> Fp8Numbers:
        """Return the numbers of a weight that is stored so. ValueError for another."""
        raise ValueError("this weight is not stored as e4m3 with a scale for each output, or each block")

    def let_go(self) -> None:  # noqa: B027 (a weight may lie in no file)
        """Give back what memory pages of a file hold of the weight. They are read again when it is."""

    def quantized(self) -> Quantized:
        """Return the weight in int8 per output. A format of such numbers gives its own."""
        starts = range(0, self.shape[0], self.step)
        pieces = [quantize(self.rows(first, min(first + self.step, self.shape[0]))) for first in starts]
        return Quantized(torch.cat([p.values for p in pieces]), torch.cat([p.scales for p in pieces]))


class QuantizedWeight(EncodedWeight):
    """An int8 weight as an encoded one."""

    def __init__(self, weight: Quantized) -> None:
        self._weight = weight
        self.shape = tuple(weight.values.shape)

    def rows(self, first: int, last: int) -> Tensor:
        return Quantized(self._weight.values[first:last], self._weight.scales[first:last]).weight

    def quantized(self) -> Quantized:
        return self._weight


class JoinedExperts(EncodedWeight):
    """The matrices of experts, each in parts whose outputs come one behind the other: [experts, outputs, inputs]."""

    def __init__(self, experts: Sequence[Sequence[EncodedWeight]]) -> None:
        self._experts = experts
        parts = experts[0]
        self.shape = (len(experts), sum(part.shape[0] for part in parts), parts[0].shape[1])

    def rows(self, first: int, last: int) -> Tensor:
        each = (torch.cat([part.decoded(torch.float32) for part in parts]) for parts in self._experts[first:last])
        return torch.stack(list(each))

    @property
    def experts(self) -> Sequence[Sequence[EncodedWeight]]:
        return self._experts


class EncodedLinear(nn.Module):
    """A linear layer that computes in `dtype` and decodes its weight anew for each product."""

    def __init__(self, source: EncodedWeight, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = source.shape
        self.source = source
        self.bias = bias
        self.dtype = dtype

    @property
    def weight(self) -> Tensor:
        """Return a new copy of the decoded weight."""
        return self.source.decoded(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(*x.shape[:-1], self.out_features, dtype=x.dtype)
        for first in range(0, self.out_features, self.source.step):
            last = min(first + self.source.step, self.out_features)
            bias = None if self.bias is None else self.bias[first:last]
            out[..., first:last] = functional.linear(x, self.source.rows(first, last).to(self.dtype), bias)
        return out

    def plain(self, weight: nn.Parameter) -> nn.Linear:
        """Return a plain layer with the decoded weight."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = weight
        linear.bias = self.bias  # type: ignore[assignment]
        return linear
