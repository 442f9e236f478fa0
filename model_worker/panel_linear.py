"""Linear layers whose weight lies in panels, which the fused stack reads too, and their product without the stack.

Knows no kind of panel: linears.py and int8_linear.py do, each of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from model_worker.fusion.products import LANE_BYTES, MOST_NARROW_ROWS, PANEL, run_product
from model_worker.fusion.team import team

# Waking the other cores takes tens of microseconds: less work than this is done by one.
_BYTES_PER_CORE, _FLOPS_PER_CORE = 1_000_000, 4_000_000


class PanelLinear(nn.Module, ABC):
    """A linear layer that computes in `dtype`; `panels` hold its weight."""

    panels: NDArray[Any]

    def __init__(self, shape: tuple[int, ...], bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.dtype = dtype
        self.bias = None if bias is None else bias.detach()
        self._added = np.empty(0, np.float32) if self.bias is None else self.bias.float().numpy()

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """The weight in its plain order, made anew: for models that look at it outside of forward."""

    @property
    @abstractmethod
    def input_width(self) -> int:
        """Input features, with padding."""

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes

    def multiply(self, x: Tensor, widened: bool) -> Tensor:
        """x . weight + bias by our own kernel; `widened` says of int8 panels that many rows want them widened."""
        rows = x.detach().reshape(-1, self.in_features).to(self.dtype)
        operand = functional.pad(rows, (0, self.input_width - self.in_features)).contiguous()
        out = torch.empty(len(rows), self.out_features, dtype=self.dtype)
        cores, rooms = self._cores(len(rows)), None
        if widened:
            steps = self.input_width * self.dtype.itemsize // LANE_BYTES if len(rows) > MOST_NARROW_ROWS else 0
            rooms = np.empty((cores, steps, PANEL), np.uint32)
        arguments = _numbers(operand), self.panels.ctypes.data, self._added, _numbers(out), rooms
        team(cores).run(run_product, cores, *arguments)
        return out.reshape(*x.shape[:-1], self.out_features)

    def _cores(self, rows: int) -> int:
        flops = 2 * rows * self.in_features * self.out_features
        worth = max(self.num_bytes // _BYTES_PER_CORE, flops // _FLOPS_PER_CORE)
        return max(1, min(worth, torch.get_num_threads()))


def _numbers(tensor: Tensor) -> NDArray[Any]:
    """A tensor as numpy sees it; bfloat16 as its bits."""
    array: NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
