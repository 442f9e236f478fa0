"""Transformers' own modules, whose attention reads the paged KV cache, and their decode steps as recorded graphs.

Where a GPU has the layers in few launches, these compute what they take. Adapters are hooks on the modules. Knows how
to call a model of transformers so that its attention finds our cache. Does not know requests, rows or sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from model_worker.adapters.fitting import Adapter
from model_worker.adapters.hooks import AdapterHooks
from model_worker.agreement import Agreed, together
from model_worker.attention import (
    PAGED_ATTENTION,
    RECORDABLE,
    AttentionBackend,
    PagedForward,
    paged_forward,
    reference,
    triton,
)
from model_worker.attention.coded import CodedCache
from model_worker.attention.coded import attend as coded_attend
from model_worker.backends.adapter_files import read_for
from model_worker.backends.base import AdapterFacts, Backend, levels_of, most_adapter_bytes, one_pass
from model_worker.batch import ForwardBatch
from model_worker.cuda.adapted_graphs import AdaptedGraphs
from model_worker.cuda.fill_proof import fills_are_right
from model_worker.cuda.graphs import CudaRecorder, DecodeBuffers, DecodeGraphs
from model_worker.cuda.memory import is_for_want_of_memory
from model_worker.cuda.mixed_graphs import MixedBuffers, MixedGraphs
from model_worker.embedding_hooks import added_behind_layers, taken_inputs
from model_worker.kv_cache import KVCache
from model_worker.model import LoadedModel
from model_worker.recurrent.mixers import advancing, recurrent_pass

log = logging.getLogger(__name__)


class ModulesBackend(Backend):
    """A model's modules on a cache, attending by `attend`, or by plain torch where that cannot.

    A cache in codes is laid out as the fused stack reads it, and plain torch attends to it.
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache, attend: AttentionBackend) -> None:
        self.device = loaded.device
        self.vocab_size = loaded.vocab_size
        self._loaded = loaded
        self._cache = cache
        self._paged: KVCache | CodedCache = cache
        self._attend = attend
        # For batches with tokens that see later keys.
        self._attend_later = reference.attend if attend in RECORDABLE else attend
        if cache.layout.in_codes:
            self._paged = CodedCache(cache)
            self._attend = self._attend_later = coded_attend
        # They write K and V by themselves, as these kernels read them.
        self._layers = loaded.layers if attend in RECORDABLE else None
        self._graphs: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None
        self._adapted: AdaptedGraphs | None = None
        self._adapters = AdapterHooks(loaded.model, loaded.device, loaded.dtype, kernels=attend is triton.attend)
        loaded.model.set_attn_implementation(PAGED_ATTENTION)

    def record(
        self, max_rows: int, max_model_len: int, max_tokens: int, spare_block: int, agreed: Agreed | None = None
    ) -> None:
        """Record steps of sequences up to `max_model_len` tokens as graphs. Padding uses `spare_block`.

        Decode steps, and with Triton's attention also those with prompts, of up to `max_tokens` tokens; 0: none. Of a
        model with recurrent states decode steps alone.

        A model whose forward pass waits for the device (for routing tokens to experts, say) runs without, and so does
        one for want of memory. In a group `agreed` says whether something is so on all ranks: they record the same
        steps, or none. There a want of memory is raised, since others have launched sums of the step.
        """
        blocks = -(-max_model_len // self._cache.block_size)
        has_triton = self._attend is triton.attend
        recorder = CudaRecorder()
        states = self._cache.states

        def make_buffers() -> tuple[MixedBuffers | None, DecodeBuffers]:
            kernels = has_triton and fills_are_right(self.device)
            places = blocks, self._cache.block_size, spare_block, self.device, kernels
            # Mixers cut prompts by what is known on the host alone.
            with_prompts = max_tokens and has_triton and states is None
            mixed = MixedBuffers(max_tokens, max_rows, *places) if with_prompts else None
            return mixed, DecodeBuffers(max_rows, *places, None if states is None else states.spare_row)

        def recorded(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
            return together(agreed, lambda: recorder(step))

        try:
            with torch.inference_mode():
                mixed, decode = together(agreed, make_buffers)
                if mixed is not None:
                    self._mixed = MixedGraphs(self._forward, mixed, recorded)
                self._graphs = DecodeGraphs(self._forward, decode, recorded)
                if agreed is None and self._adapters.slots is not None:
                    self._adapted = AdaptedGraphs(self._graphs, self._mixed, self._in_slots, recorder)
        except RuntimeError as error:  # torch.OutOfMemoryError, too: steps need no recording
            self._graphs = self._mixed = self._adapted = None
            # The end of a capture may have an error of its own.
            for cause in (error, error.__context__):
                if agreed is not None and isinstance(cause, Exception) and is_for_want_of_memory(cause):
                    raise cause from None
            reason = str(error).partition("\n")[0]
            log.warning("%s decodes without graphs, which is slow: %s", self._loaded.architecture, reason)

    @property
    def fuses(self) -> bool:
        """Whether layers are computed in few launches, where a pass has no adapters and no later tokens are seen."""
        return self._layers is not None

    @property
    def records(self) -> bool:
        """Whether decode steps are recorded."""
        return self._graphs is not None

    def logits(self, batch: ForwardBatch) -> Tensor:
        with one_pass(batch, self._cache, self._loaded.embedding):
            if self._graphs is not None and self._graphs.fits(batch):
                with advancing(self._cache.states, batch):
                    return self._graphs.run(batch)
            if self._mixed is not None and self._mixed.fits(batch):
                return self._mixed.run(batch)
            adapted = None if batch.adapters is None else self._replay_adapted(batch)
            if adapted is not None:
                return adapted
            return self._forward(batch.resolved())

    @property
    def keeps_states(self) -> bool:
        return self._cache.states is not None

    @property
    def gives_hidden_states(self) -> bool:
        return self._loaded.model.get_output_embeddings() is not None

    def hidden(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        with (
            one_pass(batch, self._cache, self._loaded.embedding),
            taken_inputs(self._loaded.model.get_output_embeddings()) as taken,
        ):
            logits = self._forward(batch)
        return logits, taken[0].reshape(len(logits), -1)

    @property
    def takes_adapters(self) -> bool:
        return True

    def load_adapter(self, handle: int, path: str) -> AdapterFacts:
        adapter, seen = read_for(self._loaded, Path(path), most_adapter_bytes())
        size = self.add_adapter(handle, adapter)
        if self._loaded.encoder is not None:
            size += self._loaded.encoder.adapters.add(handle, adapter.digest, seen)
        return AdapterFacts(adapter.digest, adapter.rank, size)

    def add_adapter(self, handle: int, adapter: Adapter) -> int:
        """Keep an adapter that was read. Returns its bytes."""
        return self._adapters.add(handle, adapter)

    def drop_adapter(self, handle: int) -> None:
        self._adapters.drop(handle)
        if self._loaded.encoder is not None:
            self._loaded.encoder.adapters.drop(handle)

    def _replay_adapted(self, batch: ForwardBatch) -> Tensor | None:
        """Compute a batch with adapters as it was recorded, or record it first. None if it cannot be."""
        slots = self._adapters.slots
        if self._adapted is None or slots is None or batch.adapters is None or batch.seen is not None:
            return None
        if not slots.has_all(batch.adapters) or not self._adapted.fits(batch):
            return None
        if not self._adapted.record(batch, slots.generation):
            return None
        with advancing(self._cache.states, batch):
            return self._adapted.run(batch, slots.column(batch.adapters))

    def _in_slots(self, batch: ForwardBatch, column: Tensor) -> Tensor:
        """Compute a batch whose tokens have the adapters of these slots."""
        with self._adapters.in_slots(column, batch.logit_positions):
            return self._forward(batch)

    def _forward(self, batch: ForwardBatch) -> Tensor:
        with self._adapters.rows(batch):
            return self._computed(batch)

    def _computed(self, batch: ForwardBatch) -> Tensor:
        attention = self._loaded.attention
        attend = self._attend if batch.seen is None else self._attend_later
        levels = levels_of(batch, self._loaded.hidden_size)
        in_kernels = self._adapters.in_kernels
        plain = batch.adapters is None or in_kernels
        if self._layers is not None and plain and batch.seen is None and not levels:
            change = self._adapters.change if in_kernels else None
            return self._layers.logits(batch, self._cache, attend, attention.params, change)
        added = added_behind_layers(batch, levels) if levels else {}
        paged = PagedForward(batch, self._paged, attend, attention.layer_of, attention.params)
        with paged_forward(paged), recurrent_pass(self._cache.states, batch):
            output = self._loaded.model(
                input_ids=batch.tokens.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(-2),
                logits_to_keep=batch.logit_positions,
                use_cache=False,
                **added,
            )
        logits: Tensor = output.logits[0]
        return logits
