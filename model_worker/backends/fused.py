"""The fused stack on a KV cache: a whole pass in one compiled call.

It knows no attention to later keys, and nothing that images add behind a layer. Batches with these run on the modules,
on the same cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model_worker.adapters.fitting import read_adapter
from model_worker.backends.base import (
    AdapterFacts,
    Backend,
    GreedyTokens,
    levels_of,
    most_adapter_bytes,
    one_pass,
)
from model_worker.backends.modules import ModulesBackend
from model_worker.batch import DeferredTokens, ForwardBatch
from model_worker.kv_cache import KVCache
from model_worker.model import CompiledStack, LoadedModel


class FusedBackend(Backend):
    """`stack` must fit the cache's blocks. `modules` compute the other batches on its cache."""

    def __init__(self, loaded: LoadedModel, stack: CompiledStack, cache: KVCache, modules: ModulesBackend) -> None:
        self.device = loaded.device
        self.vocab_size = loaded.vocab_size
        self._loaded = loaded
        self._stack = stack
        self._cache = cache
        self._modules = modules

    def _takes(self, batch: ForwardBatch) -> bool:
        return batch.seen is None and not levels_of(batch, self._loaded.hidden_size)

    def logits(self, batch: ForwardBatch) -> Tensor:
        if not self._takes(batch):
            return self._modules.logits(batch)
        with one_pass(batch, self._cache, self._loaded.embedding):
            return self._stack.logits(batch, self._cache)

    def greedy(self, batch: ForwardBatch, wanted: NDArray[np.bool_]) -> tuple[GreedyTokens, Tensor]:
        """The stack finds the largest logits while it multiplies; those not wanted never come to memory."""
        if not self._takes(batch):
            return self._modules.greedy(batch, wanted)
        with one_pass(batch, self._cache, self._loaded.embedding):
            return self._stack.greedy(batch, self._cache, wanted)

    @property
    def row_invariant(self) -> bool:
        """A pass with more than the stack takes runs on the modules, with all of its rows."""
        encoder = self._loaded.encoder
        return self._loaded.row_invariant and (encoder is None or encoder.family.plain)

    @property
    def gives_hidden_states(self) -> bool:
        return True

    def hidden(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        if not self._takes(batch):
            return self._modules.hidden(batch)
        with one_pass(batch, self._cache, self._loaded.embedding):
            return self._stack.hidden(batch, self._cache)

    @property
    def takes_adapters(self) -> bool:
        return True

    def load_adapter(self, handle: int, path: str) -> AdapterFacts:
        adapter = read_adapter(Path(path), self._loaded.model, most_adapter_bytes())
        size = self._stack.add_adapter(handle, adapter)
        if self._loaded.encoder is not None:
            size += self._modules.add_adapter(handle, adapter)
        return AdapterFacts(adapter.digest, adapter.rank, size)

    def drop_adapter(self, handle: int) -> None:
        self._stack.drop_adapter(handle)
        self._modules.drop_adapter(handle)

    @property
    def overlaps(self) -> bool:
        return self._stack.overlaps

    def launch(self, batch: ForwardBatch, deferred: DeferredTokens) -> Callable[[], GreedyTokens]:
        with one_pass(batch, self._cache, self._loaded.embedding):
            return self._stack.launch(batch, self._cache, deferred)
