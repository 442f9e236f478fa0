"""Linear layers whose weights stay in codes of 4, 5, 6 or 8 bits, as a quantised checkpoint has them.

Knows how a weight is read a few outputs at a time, so that it never exists dequantised. Does not know files (codes.py
says what a reader gives), nor how codes lie in memory (coded_panels.py), nor how a product is computed
(coded_format.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from model_worker.cpu.gemm.coded_format import HEADER_BYTES, WORD_BITS, CodedFormat, coded_format
from model_worker.cpu.gemm.coded_panels import Layout, UnsupportedCodes, layout_of, normalised, pack, unpacked
from model_worker.cpu.gemm.panel_linear import PanelLinear
from model_worker.cpu.gemm.weight_format import HALVES, LANE_BYTES, PANEL
from model_worker.cpu.simd.dot_codes import GROUP_INPUTS
from shared.weight_codes import Codes

__all__ = ["CodedLinear", "Read", "UnsupportedCodes"]

# Gives the codes of outputs from the first number up to the second.
Read = Callable[[int, int], Codes]

# Outputs that are read at a time.
READ_OUTPUTS = 4 * PANEL


class CodedLinear(PanelLinear):
    """A linear layer with a weight in codes, which computes in `dtype`."""

    def __init__(self, shape: tuple[int, int], bias: Tensor | None, dtype: torch.dtype, read: Read) -> None:
        """Read the weight [outputs, inputs]. Raises UnsupportedCodes if panels cannot hold it."""
        super().__init__(shape, bias, dtype)
        # The input of each column of the panels; None: they are in order.
        self.order: NDArray[np.int32] | None = None
        outputs = shape[0]
        for first in range(0, outputs, READ_OUTPUTS):
            codes = normalised(read(first, min(first + READ_OUTPUTS, outputs)))
            if first == 0:
                self.layout = layout_of(codes)
                self.order = codes.order
                # [panel, header, then halves as `pack` writes them]
                self.panels: NDArray[np.uint8] = self._empty_panels()
            pack(codes, self.layout, self._halves[first // PANEL : (first + READ_OUTPUTS) // PANEL])

    def _empty_panels(self) -> NDArray[np.uint8]:
        """Return panels with nothing but headers."""
        # Memory of torch begins with a line, that of numpy does not.
        memory = torch.empty(-(-self.out_features // PANEL), self.layout.panel_bytes, dtype=torch.uint8)
        panels: NDArray[np.uint8] = memory.numpy()
        panels[:, :HEADER_BYTES] = self.layout.header().view(np.uint8)
        return panels

    @property
    def _halves(self) -> NDArray[np.uint8]:
        """View the panels as halves: [panel, half, bytes]."""
        shape = len(self.panels), HALVES, self.layout.half_bytes
        strides = self.layout.panel_bytes, self.layout.half_bytes, 1
        view: NDArray[np.uint8] = np.lib.stride_tricks.as_strided(self.panels[0, HEADER_BYTES:], shape, strides)
        return view

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x if self.order is None else x[..., torch.from_numpy(self.order)])

    @property
    def weight(self) -> Tensor:
        return self.rows(torch.arange(self.out_features)).to(self.dtype)

    def rows(self, numbers: Tensor) -> Tensor:
        """Return some outputs' weights, float32 [.., inputs]: as rows of an embedding, too."""
        flat = numbers.detach().reshape(-1).numpy()
        return torch.from_numpy(self._rows(flat)).reshape(*numbers.shape, self.in_features)

    def _rows(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.codes(numbers).weight

    def codes(self, numbers: NDArray[np.int64]) -> Codes:
        """Return the codes of some outputs."""
        return unpacked(self.layout, self._halves, numbers)._replace(order=self.order)

    @property
    def input_width(self) -> int:
        return self.in_features

    @property
    def operand_element(self) -> Any:
        # Codes are multiplied by 16 bits of each activation, of which bfloat16 has eight.
        return np.float32

    def weight_format(self, cores: int, rows: int, elements: int) -> CodedFormat:
        return coded_format(cores, rows, elements, self.in_features)


class WordLinear(CodedLinear):
    """A linear layer with a bfloat16 weight in a model whose other layers are in codes: in panels like theirs."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        """Take a weight whose values are all bfloat16's, of an even number of inputs."""
        PanelLinear.__init__(self, tuple(weight.shape), bias, dtype)
        self.order = None
        self.layout = Layout(WORD_BITS, self.in_features, 0, 0, {}, 0)
        self.panels = self._empty_panels()
        padded = functional.pad(weight.detach().bfloat16(), (0, 0, 0, -self.out_features % PANEL))
        words = padded.view(torch.int32).reshape(len(self.panels), PANEL, -1).transpose(1, 2).contiguous()
        self.panels[:, HEADER_BYTES:] = words.reshape(len(words), -1).view(torch.uint8).numpy()

    def _rows(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        words = np.lib.stride_tricks.as_strided(
            self.panels[0, HEADER_BYTES:].view(np.uint32),
            (len(self.panels), self.in_features // 2, PANEL),
            (self.layout.panel_bytes, PANEL * LANE_BYTES, LANE_BYTES),
        )
        halves = np.ascontiguousarray(words[numbers // PANEL, :, numbers % PANEL]).view(np.uint16)
        weight: NDArray[np.float32] = (halves.astype(np.uint32) << 16).view(np.float32)
        return weight


def can_be_words(weight: Tensor) -> bool:
    """Whether a weight fits panels of bfloat16 beside those of codes, exactly."""
    return weight.shape[1] % GROUP_INPUTS == 0 and bool((weight == weight.bfloat16()).all())
