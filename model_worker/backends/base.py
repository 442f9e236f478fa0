"""What executors ask of a model: logits, greedy tokens, hidden states, and passes that are launched and read later.

Knows batches and tensors. Does not know what computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model_worker.batch import DeferredTokens, ForwardBatch
from model_worker.embedding_hooks import given_embeddings
from model_worker.kv_cache import KVCache
from model_worker.model import TakeResiduals
from model_worker.sampling.sampler import argmax
from shared.resources import free_memory

# Tokens i64[L] of the rows whose logits a batch wants; -1 where a row's largest logit is not finite.
GreedyTokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """An adapter that was loaded: the digest of its content, its largest rank, and its memory in bytes."""

    digest: str
    rank: int
    size: int


class Backend(ABC):
    """One way to compute a batch on `device`. A pass writes the K and V of its tokens into the cache.

    Logits [L, vocab] are those at `batch.logit_positions`; columns from `vocab_size` on stand for no token. On CUDA the
    next pass may overwrite them.
    """

    device: torch.device
    vocab_size: int

    @abstractmethod
    def logits(self, batch: ForwardBatch) -> Tensor:
        """Return the logits."""

    def greedy(self, batch: ForwardBatch, wanted: NDArray[np.bool_]) -> tuple[GreedyTokens, Tensor]:
        """Return the token of each row's largest logit, and the logits of the rows `wanted`."""
        logits = self.logits(batch)
        return argmax(logits[:, : self.vocab_size]), logits[torch.from_numpy(wanted)]

    @property
    def row_invariant(self) -> bool:
        """Whether a row gets the same bits whatever else is in its pass, and however its prompt is cut."""
        return False

    @property
    def keeps_states(self) -> bool:
        """Whether recurrent layers have states of the batch's rows, which a pass advances."""
        return False

    @property
    def gives_hidden_states(self) -> bool:
        return False

    def hidden(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return the logits, and what they are made of: the hidden states [L, hidden] after the last norm."""
        raise NotImplementedError(f"{type(self).__name__} gives no hidden states")

    @property
    def overlaps(self) -> bool:
        """Whether `launch` may and should be used: a pass takes long enough to do other work meanwhile."""
        return False

    def launch(self, batch: ForwardBatch, deferred: DeferredTokens) -> Callable[[], GreedyTokens]:
        """Launch a greedy pass. Returns what waits for its tokens; passes are waited for in the order of launch."""
        raise NotImplementedError(f"{type(self).__name__} launches no passes")

    def watch(self, layers: Sequence[int], take: TakeResiduals) -> None:
        """Give `take` the residual as it enters these layers, after each pass whose sequences have rows.

        A layer's number may be that of all layers, which stands for what leaves the last one.
        """
        raise NotImplementedError(f"{type(self).__name__} gives no residuals")

    @property
    def ends(self) -> tuple[nn.Module, nn.Module]:
        """The modules that make vectors of tokens, and logits of hidden states."""
        raise NotImplementedError(f"{type(self).__name__} gives no modules")

    @property
    def takes_adapters(self) -> bool:
        """Whether adapters can be loaded. `ForwardBatch.adapters` names those of a pass."""
        return False

    def load_adapter(self, handle: int, path: str) -> AdapterFacts:
        """Read the adapter in the folder `path`, and keep it for passes under `handle`, which is at least 1.

        It takes the place of one that had the handle, which no pass uses.
        Runs in a thread of its own, beside passes. Raises FileNotFoundError where there is no adapter, and ValueError
        or OSError, with the reason and the remedy, for one that cannot be used; nothing of it is kept then.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no adapters")

    def drop_adapter(self, handle: int) -> None:
        """Free an adapter. No pass that uses it is in flight. Nothing happens for an unknown handle."""
        raise NotImplementedError(f"{type(self).__name__} takes no adapters")


def most_adapter_bytes() -> int:
    """Return the most bytes that the tensors of an adapter may take: it is read whole before it is packed."""
    return free_memory() // 4


def levels_of(batch: ForwardBatch, hidden_size: int) -> int:
    """Return how many layers have something to add behind them for the batch's embeddings."""
    return 0 if batch.embeddings is None else batch.embeddings[1].shape[1] // hidden_size - 1


@contextmanager
def one_pass(batch: ForwardBatch, cache: KVCache, embedding: nn.Module) -> Iterator[None]:
    """The context of a pass: without gradients, and with the batch's own embeddings. ValueError for a wrong batch."""
    if batch.block_size != cache.block_size:
        raise ValueError(f"the batch has blocks of {batch.block_size} tokens, the cache of {cache.block_size}")
    with torch.inference_mode(), given_embeddings(embedding, batch):
        yield
