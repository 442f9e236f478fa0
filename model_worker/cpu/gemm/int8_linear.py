"""Linear layers with int8 weights and a float32 scale for each output; activations keep their dtype.

Knows how a weight is quantized, and the one order in which it lies in memory, which the modules here and the fused
stack both read. Does not know models, nor how a product is computed (int8_format.py does).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from model_worker.cpu.gemm.int8_format import SCALE_BYTES, Int8Format, int8_format
from model_worker.cpu.gemm.panel_linear import PanelLinear
from model_worker.cpu.gemm.weight_format import PANEL
from model_worker.cpu.simd.fixed_point import OFFSET, PLACES, WORD_BYTES, width_of

LARGEST = 127


class Quantized(NamedTuple):
    """A quantized weight [out, in]: integers from -127 to 127, and a scale for each output."""

    values: Tensor
    scales: Tensor

    @property
    def weight(self) -> Tensor:
        """Return the dequantized weight, in float32."""
        return self.values * self.scales[:, None]


def quantize(weight: Tensor) -> Quantized:
    """Quantize a weight to the nearest of 255 evenly spaced values, the greatest of which is each output's greatest
    weight."""
    exact = weight.detach().float()
    peaks = exact.abs().amax(dim=1)
    scales = torch.where(peaks > 0, peaks / LARGEST, 1.0)
    return Quantized((exact / scales[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales)


class Int8Linear(PanelLinear):
    """A linear layer with weights of one byte."""

    def __init__(self, weight: Quantized, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(tuple(weight.values.shape), bias, dtype)
        # [panel, SCALE_BYTES + padded inputs * PANEL]: the scales of a panel's outputs, then the weights as words
        # [step, output] of four inputs in the order PLACES, whose bytes are OFFSET too large. Padded with zeros.
        self.panels: NDArray[np.uint8] = int8_panels(weight).numpy()

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x)

    @property
    def weight(self) -> Tensor:
        """Return the dequantized weight."""
        memory = torch.from_numpy(self.panels)
        steps = self.input_width // WORD_BYTES
        scales = memory[:, :SCALE_BYTES].contiguous().view(torch.float32).reshape(-1)
        words = memory[:, SCALE_BYTES:].reshape(-1, steps, PANEL, WORD_BYTES)[..., PLACES]
        values = words.transpose(1, 2).reshape(-1, self.input_width).float() - OFFSET
        weight = values[: self.out_features, : self.in_features] * scales[: self.out_features, None]
        return weight.to(self.dtype)

    @property
    def input_width(self) -> int:
        return int(self.panels.shape[1] - SCALE_BYTES) // PANEL

    def weight_format(self, cores: int, rows: int, elements: int) -> Int8Format:
        return int8_format(self.element, cores, rows, elements)


def int8_panels(weight: Quantized) -> Tensor:
    """Reorder a quantized weight as Int8Linear.panels describes."""
    outputs, inputs = weight.values.shape
    count = -(-outputs // PANEL)
    width = width_of(inputs)
    panels = torch.empty(count, SCALE_BYTES + width * PANEL, dtype=torch.uint8)
    scales = functional.pad(weight.scales, (0, count * PANEL - outputs)).reshape(count, PANEL)
    values = functional.pad(weight.values, (0, width - inputs, 0, count * PANEL - outputs))
    words = values.view(torch.uint8).bitwise_xor(OFFSET).reshape(count, PANEL, -1, WORD_BYTES)[..., PLACES]
    panels[:, :SCALE_BYTES] = scales.view(torch.uint8)
    panels[:, SCALE_BYTES:] = words.transpose(1, 2).reshape(count, -1)
    return panels
