"""What stands for a tensor while transformers makes the modules of a model whose weights come otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Placeholder:
    """A tensor of a shape, which takes no memory: indexed, as transformers reads files, it gives zeros."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, _: object) -> Tensor:
        return torch.zeros(1, dtype=self.dtype).expand(self.shape)
