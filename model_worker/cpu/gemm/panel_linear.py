"""Linear layers whose weight lies in panels, which the fused stack reads too, and their product without the stack.

Knows no format: packed_linear.py and int8_linear.py do, each of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from model_worker.cpu.gemm.products import run_product
from model_worker.cpu.gemm.weight_format import WeightFormat
from model_worker.cpu.simd.dot_bf16 import operand_dtype
from model_worker.cpu.threads import thread_pool

# Waking the other cores takes tens of microseconds: less work than this is done by one.
_BYTES_PER_CORE = 1_000_000
_FLOPS_PER_CORE = 4_000_000


class PanelLinear(nn.Module, ABC):
    """A linear layer that computes in `dtype`; `panels` hold its weight."""

    panels: NDArray[Any]
    # What inputs are multiplied by before they come here, since the weight was divided by it; None where it was not.
    input_scales: Tensor | None = None

    def __init__(self, shape: tuple[int, ...], bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.dtype = dtype
        self.bias = None if bias is None else bias.detach()
        self._added = np.empty(0, np.float32) if self.bias is None else self.bias.float().numpy()

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """Return a new copy of the weight in its plain order, for models that look at it outside of forward."""

    @property
    @abstractmethod
    def input_width(self) -> int:
        """Input features, with padding."""

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes

    @abstractmethod
    def weight_format(self, cores: int, rows: int, elements: int) -> WeightFormat:
        """Return the format of the panels, with room for operands of so many rows, and elements, on each core."""

    @property
    def element(self) -> Any:
        """Return numpy's type of elements: uint16 stands for bfloat16."""
        return np.uint16 if self.dtype == torch.bfloat16 else np.float32

    @property
    def operand_element(self) -> Any:
        """Return numpy's type of the elements of operands."""
        return operand_dtype(self.element)

    def multiply(self, x: Tensor, most_cores: int | None = None) -> Tensor:
        """Compute x . weight + bias by our own kernel, on at most so many cores; None: on torch's."""
        rows = x.detach().reshape(-1, self.in_features).to(self.dtype)
        padded = functional.pad(rows, (0, self.input_width - self.in_features)).contiguous()
        out = torch.empty(len(rows), self.out_features, dtype=self.dtype)
        cores = self._cores(len(rows), most_cores)
        operand = _numbers(padded if self.operand_element == self.element else padded.float())
        weight_format = self.weight_format(cores, len(rows), operand.size)
        arguments = operand, self.panels.ctypes.data, self._added, _numbers(out), weight_format
        thread_pool(cores).run(run_product, cores, *arguments)
        return out.reshape(*x.shape[:-1], self.out_features)

    def _cores(self, rows: int, most: int | None = None) -> int:
        flops = 2 * rows * self.in_features * self.out_features
        worth = max(self.num_bytes // _BYTES_PER_CORE, flops // _FLOPS_PER_CORE)
        return max(1, min(worth, most or torch.get_num_threads()))


def _numbers(tensor: Tensor) -> NDArray[Any]:
    """View a tensor as numpy sees it; bfloat16 as its bits."""
    array: NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
