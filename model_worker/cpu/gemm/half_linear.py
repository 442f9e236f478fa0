"""Linear layers whose float32 weights are numbers of float16, all of them: their panels take half the bytes.

A model that was published in float16 has such weights, as Whisper has, though its files say float32. They are widened
in registers, and multiplied and summed as those of float32 are: a product has the same bits. One of few rows, which
waits for memory, reads half as much. Does not know the purpose of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from model_worker.cpu.gemm.packed_linear import agree, is_plain
from model_worker.cpu.gemm.panel_linear import PanelLinear
from model_worker.cpu.gemm.weight_format import HALF, HALVES, PANEL
from model_worker.cpu.gemm.word_format import WordFormat, word_format
from model_worker.cpu.huge_pages import keep_in_huge_pages
from model_worker.cpu.simd.dot_bf16 import HAS_HALVES

# Inputs of a step.
_INPUTS = 2
# Bytes of a float32 that are not needed.
_SAVED = 2


class HalfLinear(PanelLinear):
    """A linear layer that computes in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take a weight of float32 that `are_halves`."""
        super().__init__(tuple(weight.shape), bias, torch.float32)
        # Words [panel, step, PANEL]: for each half of the panel its 32 outputs' float16 of the step's first input, then
        # those of its second one. Both dimensions are padded with zeros.
        self.panels: NDArray[np.uint32] = _panels(weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x)

    @property
    def weight(self) -> Tensor:
        halves = torch.from_numpy(self.panels.view(np.int16)).view(torch.float16)
        split = halves.reshape(len(self.panels), -1, HALVES, _INPUTS, HALF).permute(0, 2, 4, 1, 3)
        whole = split.reshape(len(self.panels) * PANEL, self.input_width)
        return whole[: self.out_features, : self.in_features].float()

    @property
    def input_width(self) -> int:
        return _INPUTS * int(self.panels.shape[1])

    def weight_format(self, cores: int, rows: int, elements: int) -> WordFormat:
        return word_format(np.int16)


def are_halves(linears: Sequence[nn.Module]) -> bool:
    """Whether the weights of linear modules are of float32 and all their numbers of float16, and this CPU widens
    those."""
    return HAS_HALVES and all(type(linear) is nn.Linear and _is_half(linear.weight) for linear in linears)


def _is_half(weight: Tensor) -> bool:
    plain = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.numel() > 0
    return plain and bool((weight.half().float() == weight).all())


def pack_halves(model: nn.Module, linears: Sequence[nn.Module]) -> int:
    """Swap linear modules of a model that `are_halves`, wherever they stand in it. Returns the bytes that it saves.

    One that has hooks or a forward of its own, or whose swapped form computes something else, stays as it is.
    """
    proven = {linear: _proven(linear) for linear in linears if is_plain(linear)}
    made = {linear: halves for linear, halves in proven.items() if halves is not None}
    places = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    for parent, name, child in places:
        if child in made:
            setattr(parent, name, made[child])
    panels = [linear.panels for linear in made.values()]
    Thread(target=keep_in_huge_pages, args=(panels,), kwargs={"written": True}, name="huge-pages").start()
    return sum(_SAVED * linear.out_features * linear.in_features for linear in made.values())


def _proven(linear: nn.Module) -> HalfLinear | None:
    """Return the form in halves of a linear module, if it computes the same."""
    assert isinstance(linear, nn.Linear)
    with torch.inference_mode():
        halves = HalfLinear(linear.weight, linear.bias)
        x = torch.randn(2, linear.in_features, generator=torch.Generator().manual_seed(0))
        return halves if agree(halves(x), linear(x), torch.float32) else None


def _panels(weight: Tensor) -> NDArray[np.uint32]:
    outputs, inputs = weight.shape
    padded = functional.pad(weight.half(), (0, inputs % _INPUTS, 0, -outputs % PANEL))
    split = padded.reshape(-1, HALVES, HALF, padded.shape[1] // _INPUTS, _INPUTS).permute(0, 3, 1, 4, 2)
    words = split.contiguous().view(torch.int32).reshape(len(padded) // PANEL, -1, PANEL)
    found: NDArray[np.uint32] = words.numpy().view(np.uint32)
    return found
