"""Keeps rotary position embeddings independent of the rest of the batch.

With LongRoPE, transformers chooses one of two sets of frequencies for a whole forward pass by its longest sequence. In
a packed batch a short sequence would then change with its neighbours, and a long one in the middle of its text. So one
set is chosen when the model is loaded: the long one if sequences may outgrow the original context, else the short one.

Frequencies of the "dynamic" kind change only past max_position_embeddings, where no sequence gets. Yet transformers
asks for the largest position in each pass, which a GPU's worker would wait for and cannot record. So they are fixed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

LONGROPE = "longrope"
DYNAMIC = "dynamic"
PINNED = "default"


def pin_rope(model: nn.Module, max_model_len: int) -> None:
    """Fix the frequencies of all modules whose frequencies may change, for sequences of at most `max_model_len`
    tokens."""
    module: Any
    for module in model.modules():
        rope_type: str | dict[str, str] | None = getattr(module, "rope_type", None)
        if rope_type == LONGROPE:
            _use(module, None, "", max_model_len)
            module.rope_type = PINNED
        elif rope_type == DYNAMIC:
            module.rope_type = PINNED
        elif isinstance(rope_type, dict):
            pinned = [layer_type for layer_type, kind in rope_type.items() if kind in (LONGROPE, DYNAMIC)]
            for layer_type in pinned:
                if rope_type[layer_type] == LONGROPE:
                    _use(module, layer_type, f"{layer_type}_", max_model_len)
            module.rope_type = {**rope_type, **dict.fromkeys(pinned, PINNED)}


def _use(module: Any, layer_type: str | None, prefix: str, max_model_len: int) -> None:
    """Let transformers itself choose, once, for a sequence of the greatest length."""
    frequencies: torch.Tensor = getattr(module, f"{prefix}inv_freq")
    last_position = torch.tensor([[max_model_len - 1]], device=frequencies.device)
    sample = torch.zeros(1, device=frequencies.device)
    module(sample, last_position, **({} if layer_type is None else {"layer_type": layer_type}))
