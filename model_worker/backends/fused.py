"""The fused stack on a KV cache: a whole pass in one compiled call.

It knows no attention to later keys: models whose images need it have no stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from model_worker.backends.adapter_files import read_for
from model_worker.backends.base import (
    AdapterFacts,
    Backend,
    GreedyTokens,
    most_adapter_bytes,
    one_pass,
)
from model_worker.batch import DeferredTokens, ForwardBatch
from model_worker.kv_cache import KVCache
from model_worker.model import CompiledStack, LoadedModel, TakeResiduals


class FusedBackend(Backend):
    """`stack` must fit the cache's blocks."""

    def __init__(self, loaded: LoadedModel, stack: CompiledStack, cache: KVCache) -> None:
        self.device = loaded.device
        self.vocab_size = loaded.vocab_size
        self._loaded = loaded
        self._stack = stack
        self._cache = cache

    def logits(self, batch: ForwardBatch) -> Tensor:
        with one_pass(batch, self._cache, self._loaded.embedding):
            return self._stack.logits(batch.resolved(), self._cache)

    def greedy(self, batch: ForwardBatch, wanted: NDArray[np.bool_]) -> tuple[GreedyTokens, Tensor]:
        """The stack finds the largest logits while it multiplies; those not wanted never come to memory."""
        with one_pass(batch, self._cache, self._loaded.embedding):
            return self._stack.greedy(batch, self._cache, wanted)

    @property
    def row_invariant(self) -> bool:
        return self._loaded.row_invariant

    @property
    def gives_hidden_states(self) -> bool:
        return True

    def hidden(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        with one_pass(batch, self._cache, self._loaded.embedding):
            return self._stack.hidden(batch, self._cache)

    def watch(self, layers: Sequence[int], take: TakeResiduals) -> None:
        self._stack.watch(layers, take)

    @property
    def ends(self) -> tuple[nn.Module, nn.Module]:
        return self._loaded.embedding, self._loaded.model.get_output_embeddings()

    @property
    def takes_adapters(self) -> bool:
        return True

    def load_adapter(self, handle: int, path: str) -> AdapterFacts:
        adapter, seen = read_for(self._loaded, Path(path), most_adapter_bytes())
        size = self._stack.add_adapter(handle, adapter)
        if self._loaded.encoder is not None:
            size += self._loaded.encoder.adapters.add(handle, adapter.digest, seen)
        return AdapterFacts(adapter.digest, adapter.rank, size)

    def drop_adapter(self, handle: int) -> None:
        self._stack.drop_adapter(handle)
        if self._loaded.encoder is not None:
            self._loaded.encoder.adapters.drop(handle)

    @property
    def overlaps(self) -> bool:
        return self._stack.overlaps

    def launch(self, batch: ForwardBatch, deferred: DeferredTokens) -> Callable[[], GreedyTokens]:
        with one_pass(batch, self._cache, self._loaded.embedding):
            return self._stack.launch(batch, self._cache, deferred)
