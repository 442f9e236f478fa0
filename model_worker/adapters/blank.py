"""An adapter of all linear modules that changes nothing, to learn what adapters cost. Knows modules by their sizes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_worker.adapters.fitting import AdaptedLinear, Adapter, is_of_expert, linear_shape


def blank_adapter(model: nn.Module, rank: int, device: torch.device, dtype: torch.dtype) -> Adapter:
    """Return an adapter of zeros, which modules of equal sizes share. B lies by its ranks."""
    zeros: dict[int, Tensor] = {}

    def of_width(width: int) -> Tensor:
        if width not in zeros:
            zeros[width] = torch.zeros(rank, width, device=device, dtype=dtype)
        return zeros[width]

    linears: dict[nn.Module, AdaptedLinear] = {}
    for path, module in model.named_modules():
        shape = linear_shape(module)
        if shape is not None and not is_of_expert(path):
            linears[module] = AdaptedLinear(of_width(shape[0]), of_width(shape[1]).T, 1.0, None, None)
    return Adapter("blank", rank, linears, None)
