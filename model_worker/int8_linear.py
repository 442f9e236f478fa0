"""Linear layers with int8 weights and a float32 scale for each output; activations keep their dtype.

Knows how a weight is rounded, and the one order in which it lies in memory, which the modules here and the fused stack
both read. Does not know models, nor how a product is computed (fusion/products.py does).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from model_worker.fusion.products import PANEL, SCALE_BYTES
from model_worker.panel_linear import PanelLinear

LARGEST = 127


class Rounded(NamedTuple):
    """A weight [out, in] as whole numbers from -127 to 127 and a factor for each output."""

    values: Tensor
    scales: Tensor

    @property
    def weight(self) -> Tensor:
        """What it says, in float32."""
        return self.values * self.scales[:, None]


def rounded(weight: Tensor) -> Rounded:
    """The nearest of 255 evenly spaced values, the greatest of which is each output's greatest weight."""
    exact = weight.detach().float()
    peaks = exact.abs().amax(dim=1)
    scales = torch.where(peaks > 0, peaks / LARGEST, 1.0)
    return Rounded((exact / scales[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales)


class Int8Linear(PanelLinear):
    """A linear layer with weights of one byte."""

    def __init__(self, weight: Rounded, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(tuple(weight.values.shape), bias, dtype)
        # [panel, SCALE_BYTES + padded inputs * PANEL]: the scales of a panel's outputs, then the int8 weights as
        # [pair of inputs, half, 4, vector, 4, input of the pair]. A half is two vectors of 16 outputs, whose quarters
        # take turns: so the halves of 128-bit lanes, put side by side, are vectors. Padded with zeros.
        self.panels: NDArray[np.uint8] = int8_panels(weight).numpy()

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, widened=True)

    @property
    def weight(self) -> Tensor:
        """What the integers say."""
        count, pairs = len(self.panels), self.input_width // 2
        memory = torch.from_numpy(self.panels)
        scales = memory[:, :SCALE_BYTES].contiguous().view(torch.float32).reshape(-1)
        values = memory[:, SCALE_BYTES:].view(torch.int8).reshape(count, pairs, 2, 4, 2, 4, 2)
        values = values.permute(0, 2, 4, 3, 5, 1, 6).reshape(count * PANEL, self.input_width)
        weight = values[: self.out_features, : self.in_features] * scales[: self.out_features, None]
        return weight.to(self.dtype)

    @property
    def input_width(self) -> int:
        return int(self.panels.shape[1] - SCALE_BYTES) // PANEL


def int8_panels(weight: Rounded) -> Tensor:
    """What Int8Linear.panels describes."""
    outputs, inputs = weight.values.shape
    count, pairs = -(-outputs // PANEL), -(-inputs // 2)
    panels = torch.zeros(count, SCALE_BYTES + 2 * pairs * PANEL, dtype=torch.uint8)
    scales = functional.pad(weight.scales, (0, count * PANEL - outputs)).reshape(count, PANEL)
    values = functional.pad(weight.values, (0, 2 * pairs - inputs, 0, count * PANEL - outputs))
    order = values.reshape(count, 2, 2, 4, 4, pairs, 2).permute(0, 5, 1, 3, 2, 4, 6)
    panels[:, :SCALE_BYTES] = scales.view(torch.uint8)
    panels[:, SCALE_BYTES:] = order.reshape(count, -1).view(torch.uint8)
    return panels
