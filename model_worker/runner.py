"""One forward pass of the model over a packed batch and the paged KV cache.

Knows how to call a transformers model so that its attention finds our cache. Does not know requests, rows, sampling or
what the logits are for.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_worker.attention import (
    PAGED_ATTENTION,
    PagedForward,
    attention_backend,
    cpu,
    cuda,
    paged_forward,
    reference,
    tiled,
)
from model_worker.batch import ForwardBatch
from model_worker.cuda.graphs import CudaRecorder, DecodeBuffers, DecodeGraphs
from model_worker.embedding_hooks import added_behind_layers, given_embeddings, taken_inputs
from model_worker.kv_cache import KVCache
from model_worker.sampling.sampler import largest

if TYPE_CHECKING:
    from collections.abc import Callable

    from model_worker.cpu.fused.stack import Drawn
    from model_worker.model import CompiledStack, LoadedModel

log = logging.getLogger(__name__)


class ModelRunner:
    """A model with a KV cache of its own. Two runners may share a model, but not a forward pass at the same time."""

    def __init__(self, loaded: LoadedModel, num_blocks: int, block_size: int = 16, backend: str = "auto") -> None:
        self.loaded = loaded
        self.backend = attention_backend(loaded.backend if backend == "auto" else backend, loaded.device)
        self.backend_name = self.backend.__module__.rpartition(".")[2]
        self.num_blocks = num_blocks
        self._graphs: DecodeGraphs | None = None
        # One more, where padding rows of recorded decode steps may write.
        spare = 1 if self.backend is cuda.attend else 0
        self.cache = KVCache(loaded.attention.layout, num_blocks + spare, block_size, loaded.device)
        # The stack is the fast way of the cpu backend; with another one the model's own modules run.
        fits = loaded.stack is not None and self.backend_name == "cpu" and loaded.stack.fits(block_size)
        self._stack = loaded.stack if fits else None
        loaded.model.set_attn_implementation(PAGED_ATTENTION)

    @property
    def description(self) -> str:
        """What runs the model, in words."""
        if not self.loaded.has_kernels:
            return "plain torch, while kernels compile"
        if self._stack is not None:
            return "fused stack"
        return f"transformers' modules, {self.backend_name} attention"

    @property
    def token_capacity(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.cache.block_size

    def warm_up(self) -> None:
        """Run a decode step and a prefill chunk on block 0, so that no request waits for kernels to compile.

        What this leaves in the block is overwritten by the first sequence that gets it.
        """
        if self.backend is cpu.attend and self._stack is None:
            # Its parallel kernel only runs for more work than the passes below bring.
            cpu.warm_up(self.cache.layout.dtype)
        self.forward(self._first_tokens(min(2 * self.cache.block_size, self.token_capacity)))
        self.forward(self._first_tokens(1))

    def _first_tokens(self, length: int) -> ForwardBatch:
        """A sequence of so many tokens, all in block 0."""
        blocks, lengths = np.zeros((1, -(-length // self.cache.block_size)), np.int32), np.array([length], np.int32)
        tokens, size, wanted = np.zeros(length, np.int64), self.cache.block_size, np.array([length - 1])
        return ForwardBatch.build(tokens, lengths, lengths, blocks, size, wanted, self.loaded.device)

    def record_decode(self, max_rows: int, max_model_len: int) -> None:
        """From now on decode steps of sequences up to `max_model_len` tokens run as graphs, where the device has them.

        A model whose forward pass waits for the device (for routing tokens to experts, say) runs without.
        """
        if self.backend is not cuda.attend:
            return
        blocks = -(-max_model_len // self.cache.block_size)
        buffers = DecodeBuffers(max_rows, blocks, self.cache.block_size, self.num_blocks, self.loaded.device)
        try:
            with torch.inference_mode():
                self._graphs = DecodeGraphs(self._logits, buffers, CudaRecorder())
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            log.warning("%s decodes without graphs, which is slow: %s", self.loaded.architecture, reason)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Write the batch's tokens into the cache and return logits [L, vocab] at `batch.logit_positions`.

        On CUDA the next call may overwrite them.
        """
        self._check(batch)
        if self._graphs is not None and self._graphs.fits(batch):
            with torch.inference_mode():
                return self._graphs.run(batch)
        with torch.inference_mode(), given_embeddings(self._embedding, batch):
            stack = self._stack_for(batch)
            return self._logits(batch) if stack is None else stack.forward(batch, self.cache)

    def pick(self, batch: ForwardBatch, wanted: NDArray[np.bool_]) -> tuple[NDArray[np.int64], Tensor]:
        """The token of the largest logit of each of the L rows (-1: not finite), and the logits of the rows `wanted`.

        The stack finds the largest while it multiplies, and the other logits never come to memory.
        """
        stack = self._stack_for(batch)
        if stack is None:
            logits = self.forward(batch)
            return largest(logits[:, : self.loaded.vocab_size]), logits[torch.from_numpy(wanted)]
        self._check(batch)
        with torch.inference_mode(), given_embeddings(self._embedding, batch):
            return stack.pick(batch, self.cache, wanted)

    @property
    def runs_ahead(self) -> bool:
        """Whether `begin_pick` may and should be used."""
        return self._stack is not None and self._stack.runs_ahead

    def begin_pick(self, batch: ForwardBatch, drawn: Drawn) -> Callable[[], NDArray[np.int64]]:
        """As `pick` for no logits, but what is returned waits for the tokens; see `FusedStack.begin`."""
        assert self._stack is not None
        self._check(batch)
        with torch.inference_mode():
            return self._stack.begin(batch, self.cache, drawn)

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
            stack = self._stack_for(batch)
            if stack is not None:
                return stack.forward_with_hidden(batch, self.cache)
            with taken_inputs(self.loaded.model.get_output_embeddings()) as taken:
                logits = self._logits(batch)
            return logits, taken[0].reshape(len(logits), -1)

    @property
    def _embedding(self) -> Any:
        return self.loaded.model.get_input_embeddings()

    def _check(self, batch: ForwardBatch) -> None:
        if batch.block_size != self.cache.block_size:
            raise ValueError(f"the batch has blocks of {batch.block_size} tokens, the cache of {self.cache.block_size}")

    def _stack_for(self, batch: ForwardBatch) -> CompiledStack | None:
        """The stack, if it can compute this batch: it knows no attention to later keys, and nothing that images add
        behind a layer."""
        return None if batch.seen is not None or self._levels(batch) else self._stack

    def _levels(self, batch: ForwardBatch) -> int:
        """How many layers have something to add behind them for the batch's embeddings."""
        return 0 if batch.embeddings is None else batch.embeddings[1].shape[1] // self.hidden_size - 1

    def _logits(self, batch: ForwardBatch) -> Tensor:
        attention = self.loaded.attention
        cache: KVCache | tiled.TiledCache = self.cache
        backend = self.backend
        if self._stack is not None:
            cache = tiled.TiledCache(self.cache)
            backend = tiled.attend
        elif batch.seen is not None:
            backend = reference.attend
        context = PagedForward(batch, cache, backend, attention.layer_of, attention.params)
        positions = batch.positions.unsqueeze(-2)
        added: dict[str, Any] = {}
        if levels := self._levels(batch):
            added = added_behind_layers(batch, levels)
        with paged_forward(context):
            output = self.loaded.model(
                input_ids=batch.tokens.unsqueeze(0),
                position_ids=positions,
                logits_to_keep=batch.logit_positions,
                use_cache=False,
                **added,
            )
        logits: Tensor = output.logits[0]
        return logits
