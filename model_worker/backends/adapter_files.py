"""Reads an adapter for a loaded model: what of it is for the model that generates, and what for its image encoder.

Knows loaded models. Does not know what runs them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from model_worker.adapters.fitting import AdaptedLinear, Adapter, read_adapter
from model_worker.model import LoadedModel


def read_for(loaded: LoadedModel, folder: Path, most_bytes: int) -> tuple[Adapter, dict[nn.Module, AdaptedLinear]]:
    """Return an adapter without what changes the encoder, and that. Raises as `read_adapter` does."""
    tower = {} if loaded.encoder is None else loaded.encoder.adapters.modules
    modules = {**tower, **dict(loaded.model.named_modules())}
    adapter = read_adapter(folder, loaded.model, most_bytes, modules)
    inside = set(tower.values())
    own = {module: linear for module, linear in adapter.linears.items() if module not in inside}
    seen = {module: linear for module, linear in adapter.linears.items() if module in inside}
    return replace(adapter, linears=own), seen
