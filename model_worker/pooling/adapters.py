"""LoRA adapters on a model of the one-shot tasks: a pass has one adapter for all of its texts, or none.

A pass with an adapter runs transformers' layers, on which hooks compute it, also where compiled layers compute the
model itself. Knows how the modules of a model are called in an adapter's file. Does not know texts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from model_worker.adapters.fitting import read_adapter
from model_worker.adapters.hooks import AdapterHooks
from model_worker.backends.base import AdapterFacts, most_adapter_bytes
from model_worker.pooling.backbone import Backbone


class PoolingAdapters:
    """The adapters of a model, by handle. `backbone` is what computes a pass with one of them."""

    def __init__(self, base: PreTrainedModel, modules: dict[str, nn.Module], backbone: Backbone) -> None:
        self.backbone = backbone
        self._base = base
        self._modules = modules
        self._hooks = AdapterHooks(base, base.device, base.dtype)

    def load_adapter(self, handle: int, path: str) -> AdapterFacts:
        """Read an adapter, as `Backend.load_adapter` does."""
        adapter = read_adapter(Path(path), self._base, most_adapter_bytes(), self._modules)
        return AdapterFacts(adapter.digest, adapter.rank, self._hooks.add(handle, adapter))

    def drop_adapter(self, handle: int) -> None:
        """Free an adapter. No pass that uses it is in flight. Nothing happens for an unknown handle."""
        self._hooks.drop(handle)

    def rows(self, handle: int) -> AbstractContextManager[None]:
        """Compute all texts with an adapter, within this context."""
        return self._hooks.all_rows(handle)


def module_names(model: PreTrainedModel, base: PreTrainedModel, pooler: nn.Module | None) -> dict[str, nn.Module]:
    """Return the modules that an adapter may name: PEFT saves them as the class has them that was trained.

    `base` is the model without its head. Its `pooler` is named also where it is computed no more: what an adapter
    changes about it changes no value.
    """
    prefix = model.base_model_prefix
    own = dict(base.named_modules())
    if pooler is not None:
        own |= {f"pooler.{name}".rstrip("."): module for name, module in pooler.named_modules()}
    own.pop("", None)
    heads = {name: module for name, module in model.named_modules() if name} if model is not base else {}
    inside = {name for name in heads if f"{name}.".startswith(f"{prefix}.")}
    named = {name: module for name, module in heads.items() if name not in inside}
    # A name of a head counts before one that lies as deep in the model itself.
    return {**own, **{f"{prefix}.{name}": module for name, module in own.items()}, **named}
