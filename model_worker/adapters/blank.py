"""An adapter of all linear modules that changes nothing, to learn what adapters cost. Knows modules by their sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from model_worker.adapters.fitting import AdaptedLinear, Adapter


def blank_adapter(model: nn.Module, rank: int, device: torch.device, dtype: torch.dtype) -> Adapter:
    """Return an adapter of zeros, which modules of equal sizes share. B lies by its ranks."""
    zeros: dict[int, Tensor] = {}

    def of_width(width: int) -> Tensor:
        if width not in zeros:
            zeros[width] = torch.zeros(rank, width, device=device, dtype=dtype)
        return zeros[width]

    linears: dict[nn.Module, AdaptedLinear] = {}
    for module in model.modules():
        known: Any = module
        if isinstance(module, Conv1D):
            inputs, outputs = known.nx, known.nf
        elif hasattr(module, "in_features") and hasattr(module, "out_features"):
            inputs, outputs = known.in_features, known.out_features
        else:
            continue
        linears[module] = AdaptedLinear(of_width(int(inputs)), of_width(int(outputs)).T, 1.0, None, None)
    return Adapter("blank", rank, linears, None)
