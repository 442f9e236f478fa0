"""One forward pass of the model over a packed batch and the paged KV cache.

Knows how to call a transformers model so that its attention finds our cache. Does not know requests, rows, sampling or
what the logits are for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from model_worker.attention import PAGED_ATTENTION, PagedForward, attention_backend, cpu, paged_forward
from model_worker.batch import ForwardBatch
from model_worker.kv_cache import KVCache
from model_worker.taps import given_embeddings, taken_inputs

if TYPE_CHECKING:
    from model_worker.loader import LoadedModel


class ModelRunner:
    """A model with a KV cache of its own. Two runners may share a model, but not a forward pass at the same time."""

    def __init__(self, loaded: LoadedModel, num_blocks: int, block_size: int = 16, backend: str = "auto") -> None:
        self.loaded = loaded
        self.backend = attention_backend(backend, loaded.device)
        self.backend_name = self.backend.__module__.rpartition(".")[2]
        self.cache = KVCache(loaded.attention.layout, num_blocks, block_size, loaded.device)
        # The stack is the fast way of the cpu backend; with another one the model's own modules run.
        fits = loaded.stack is not None and self.backend_name == "cpu" and loaded.stack.fits(block_size)
        self._stack = loaded.stack if fits else None
        loaded.model.set_attn_implementation(PAGED_ATTENTION)

    @property
    def token_capacity(self) -> int:
        """Tokens that the KV cache holds."""
        return self.cache.num_blocks * self.cache.block_size

    def warm_up(self) -> None:
        """Run a decode step and a prefill chunk on block 0, so that no request waits for kernels to compile.

        What this leaves in the block is overwritten by the first sequence that gets it.
        """
        if self.backend is cpu.attend and self._stack is None:
            # Its parallel kernel only runs for more work than the passes below bring.
            cpu.warm_up(self.cache.layout.dtype)
        for length in (1, min(2 * self.cache.block_size, self.token_capacity)):
            blocks = np.zeros((1, -(-length // self.cache.block_size)), np.int32)
            lengths = np.array([length], np.int32)
            self.forward(
                ForwardBatch.build(
                    np.zeros(length, np.int64),
                    lengths,
                    lengths,
                    blocks,
                    self.cache.block_size,
                    np.array([length - 1]),
                    self.loaded.device,
                )
            )

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Write the batch's tokens into the cache and return logits [L, vocab] at `batch.logit_positions`."""
        self._check(batch)
        with torch.inference_mode(), given_embeddings(self._embedding, batch):
            return self._logits(batch) if self._stack is None else self._stack.forward(batch, self.cache)

    @property
    def hidden_size(self) -> int:
        """Width of the vectors that stand for tokens."""
        return int(self._embedding.weight.shape[1])

    @property
    def gives_hidden_states(self) -> bool:
        return self._stack is not None or self.loaded.model.get_output_embeddings() is not None

    def forward_with_hidden(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """As `forward`, and what the logits were made of: the hidden states [L, hidden] after the last norm."""
        self._check(batch)
        with torch.inference_mode(), given_embeddings(self._embedding, batch):
            if self._stack is not None:
                return self._stack.forward_with_hidden(batch, self.cache)
            with taken_inputs(self.loaded.model.get_output_embeddings()) as taken:
                logits = self._logits(batch)
            return logits, taken[0].reshape(len(logits), -1)

    @property
    def _embedding(self) -> Any:
        return self.loaded.model.get_input_embeddings()

    def _check(self, batch: ForwardBatch) -> None:
        if batch.block_size != self.cache.block_size:
            raise ValueError(f"the batch has blocks of {batch.block_size} tokens, the cache of {self.cache.block_size}")

    def _logits(self, batch: ForwardBatch) -> Tensor:
        attention = self.loaded.attention
        context = PagedForward(batch, self.cache, self.backend, attention.layer_of, attention.params)
        with paged_forward(context):
            output = self.loaded.model(
                input_ids=batch.tokens.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                logits_to_keep=batch.logit_positions,
                use_cache=False,
            )
        logits: Tensor = output.logits[0]
        return logits
