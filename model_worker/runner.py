"""A loaded model on a KV cache of its own: which backend computes it, and the first passes, for which no request waits.

Only what every model shares may stand here. Does not know requests, rows, sampling or what the logits are for.
"""

from __future__ import annotations

import numpy as np

from model_worker.agreement import Agreed
from model_worker.attention import RECORDABLE, attention_backend, cpu
from model_worker.backends.base import Backend
from model_worker.backends.fused import FusedBackend
from model_worker.backends.modules import ModulesBackend
from model_worker.backends.speech import SpeechBackend
from model_worker.batch import ForwardBatch
from model_worker.kv_cache import KVCache
from model_worker.model import LoadedModel
from model_worker.recurrent.states import RecurrentStates

# Rows whose recurrent states are kept where no number is given.
_FEW_ROWS = 16


class ModelRunner:
    """Two runners may share a model, but not a forward pass at the same time."""

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        block_size: int = 16,
        attention: str = "auto",
        cache: KVCache | None = None,
        max_rows: int = _FEW_ROWS,
    ) -> None:
        """`attention` is the name of the modules' attention; "auto" is the one that the model was verified with.

        A given `cache` has the model's layout, and is used as it is. Recurrent layers keep states of `max_rows` rows.
        """
        self.loaded = loaded
        self.num_blocks = num_blocks
        self._attend = attention_backend(loaded.attention_name if attention == "auto" else attention, loaded.device)
        self.attention_name = self._attend.__module__.rpartition(".")[2]
        # One more block, and one more state, where padding rows of recorded decode steps may write.
        spare = 1 if self._attend in RECORDABLE else 0
        layers = loaded.recurrent
        states = None if cache or layers is None else RecurrentStates(layers.layout, max_rows, loaded.device, spare)
        shape = loaded.attention.layout, num_blocks + spare, block_size
        self.cache = cache or KVCache(*shape, loaded.device, states)
        self.backend = self._choose_backend()

    def _choose_backend(self) -> Backend:
        """The stack is the fast way where attention is the CPU's; with another one the modules run."""
        if self.loaded.clip_tokens:
            return SpeechBackend(self.loaded, self.cache, self._attend)
        stack = self.loaded.stack
        if stack is not None and self._attend is cpu.attend and stack.fits(self.cache.block_size):
            return FusedBackend(self.loaded, stack, self.cache)
        return ModulesBackend(self.loaded, self.cache, self._attend)

    @property
    def description(self) -> str:
        """The kind of backend, in words, for operators."""
        if not self.loaded.has_kernels:
            return "plain torch, while kernels compile"
        kept = self.loaded.attention.layout
        codes = f", K and V in {str(kept.dtype).removeprefix('torch.')}" if kept.in_codes else ""
        if isinstance(self.backend, FusedBackend):
            return f"fused stack{codes}"
        fuses = isinstance(self.backend, ModulesBackend) and self.backend.fuses
        layers = "fused layers" if fuses else "transformers' modules"
        if self.cache.states is not None:
            layers = f"{layers} with recurrent states"
        return f"{layers}, {self.attention_name} attention{codes}"

    @property
    def token_capacity(self) -> int:
        """Number of tokens that the KV cache holds."""
        return self.num_blocks * self.cache.block_size

    def warm_up(self) -> None:
        """Run a decode step and a prefill chunk on block 0, so that no request waits for kernels to compile.

        What this leaves in the block is overwritten by the first sequence that gets it.
        """
        if self._attend is cpu.attend and not isinstance(self.backend, FusedBackend):
            # Its parallel kernel only runs for more work than the passes below bring.
            cpu.warm_up(self.cache.layout.dtype)
        self.backend.logits(self._first_tokens(min(2 * self.cache.block_size, self.token_capacity)))
        self.backend.logits(self._first_tokens(1))

    def record(self, max_rows: int, max_model_len: int, max_tokens: int, agreed: Agreed | None = None) -> None:
        """Record steps of sequences up to `max_model_len` tokens as graphs, where the device has them.

        Those of up to `max_tokens` tokens may have prompts in them, but for models with recurrent layers. In a group
        `agreed` says whether something is so on all ranks, and a want of memory is an error.
        """
        if self.can_record and isinstance(self.backend, ModulesBackend):
            self.backend.record(max_rows, max_model_len, max_tokens, self.num_blocks, agreed)

    @property
    def can_record(self) -> bool:
        """Whether steps are of a kind that a device can record."""
        return self._attend in RECORDABLE and isinstance(self.backend, ModulesBackend)

    @property
    def records(self) -> bool:
        """Whether decode steps are recorded."""
        return isinstance(self.backend, ModulesBackend) and self.backend.records

    def _first_tokens(self, length: int) -> ForwardBatch:
        """A sequence of `length` tokens, all in block 0."""
        size = self.cache.block_size
        blocks = np.zeros((1, -(-length // size)), np.int32)
        lengths = np.array([length], np.int32)
        last = np.array([length - 1])
        tokens = np.zeros(length, np.int64)
        return ForwardBatch.build(tokens, lengths, lengths, blocks, size, last, self.loaded.device)
