"""The naive reference of int8 weights: transformers' own model with linear weights that int8 can say, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """Each output's weights as multiples of a 127th of the largest."""
    plain = weight.detach().float().numpy()
    step = np.abs(plain).max(axis=1, keepdims=True) / np.float32(127)
    step[step == 0] = 1
    return torch.from_numpy(np.rint(plain / step) * step)


def dequantized_model(path: Path | str, dtype: torch.dtype = torch.float32) -> Any:
    """Computes in float32; `dtype` is what the weights were rounded to before int8. Embeddings keep theirs."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").float().eval()
    for module in model.modules():
        if type(module) is nn.Linear:
            module.weight = nn.Parameter(dequantized(module.weight), requires_grad=False)
    return model
