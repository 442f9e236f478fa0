"""The largest steps that a worker may be given, on a cache of one block, to learn what memory they take.

Knows shapes only: all sequences lie in the one block, and adapters are zeros, so what is computed means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import SamplingParams
from model_worker.adapters.blank import blank_adapter
from model_worker.backends.modules import ModulesBackend
from model_worker.batch import ForwardBatch
from model_worker.cuda.graphs import bucket_sizes
from model_worker.cuda.memory import GIB, DeviceMemory, MemoryPlan, plan_memory
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner
from model_worker.sampling.device_penalties import most_bytes
from model_worker.sampling.sampler import SamplerRows

# Longest sequence that is rehearsed for a model that sets no limit.
_LONGEST = 1 << 15
# Beside the cache of encoded images: what encoding one takes.
_ENCODER_ROOM = GIB
# Ranks of the adapter that is rehearsed. What lies between factors is little, whatever their ranks.
_RANK = 64
_HANDLE = 1


@dataclass(frozen=True)
class AdapterWish:
    """Adapters will be loaded, for which a worker keeps so many bytes; None: those that `MemoryPlan` chooses."""

    memory: int | None = None


def gpu_kv_memory(
    loaded: LoadedModel,
    memory: DeviceMemory,
    workers: int,
    max_tokens: int,
    max_rows: int,
    max_model_len: int | None,
    adapters: AdapterWish | None = None,
) -> MemoryPlan:
    """Plan the memory of a GPU that `workers` share, once the weights are there. `adapters`: None if there are none.

    ValueError, with the numbers, where not one block is left for K and V.
    """
    longest = max_model_len or loaded.max_position or _LONGEST
    steps = Rehearsal(loaded, max_tokens, max_rows, longest, adapters is not None)
    # Once for what libraries keep from their first call on.
    steps.decode()
    plan = plan_memory(memory, workers, steps.prompts, steps.recorded)
    # Penalties count tokens in a table that grows with the rows that have any.
    plan = replace(plan, step=plan.step + most_bytes(max_rows, loaded.vocab_size))
    plan = replace(plan, recorded=plan.recorded + steps.kept_logits)
    if loaded.encoder is not None:
        plan = replace(plan, step=plan.step + loaded.encoder.cache_bytes + _ENCODER_ROOM)
    if adapters is not None:
        plan = plan.with_adapters(adapters.memory)
    if plan.kv_cache < loaded.attention.layout.bytes_per_block(loaded.block_size):
        names = "max_batch_tokens" if adapters is None else "max_batch_tokens, lora_memory"
        raise ValueError(
            f"no memory is left for the KV cache on {plan}; lower {names} "
            "or max_running, serve fewer models there, or use a GPU with more memory"
        )
    return plan


class Rehearsal:
    """Steps of up to `max_tokens` tokens and `max_rows` rows of sequences up to `max_model_len`, and the same with
    adapters, if they are `adapted`."""

    def __init__(
        self, loaded: LoadedModel, max_tokens: int, max_rows: int, max_model_len: int, adapted: bool = False
    ) -> None:
        self._runner = ModelRunner(loaded, 1, loaded.block_size, max_rows=1)
        self._loaded = loaded
        self._tokens = max(max_tokens, max_rows)
        self._rows = max_rows
        self._longest = max_model_len
        backend = self._runner.backend
        # Others compute no rows of adapters, or none on a GPU.
        self._adaptable = backend if adapted and isinstance(backend, ModulesBackend) else None
        self._adapter = 0

    @property
    def kept_logits(self) -> int:
        """The bytes of logits that recorded steps keep beyond what the largest one takes: of each smaller number of
        decode rows, and once of all with prompts or adapters."""
        if not self._runner.can_record:
            return 0
        rows = sum(bucket_sizes(self._rows)) - self._rows
        if self._records_prompts or (self._adaptable is not None and self._runner.attention_name == "triton"):
            rows += self._rows
        return rows * self._loaded.vocab_size * self._loaded.dtype.itemsize

    @property
    def _records_prompts(self) -> bool:
        return self._runner.attention_name == "triton" and self._runner.cache.states is None

    def prompts(self) -> None:
        """Run a step of as many tokens as may be, and draw in the most expensive way for as many rows."""
        self._draw(self._forward())
        with self._adapted() as is_adapted:
            if is_adapted:
                self._forward()
                # Products of few rows are computed in pieces.
                self._decode(1)

    def _forward(self) -> torch.Tensor:
        lengths = []
        left = self._tokens
        while left:
            lengths.append(min(left, self._longest))
            left -= lengths[-1]
        wanted = np.arange(self._rows)
        return self._runner.backend.logits(self._batch(np.array(lengths), wanted))

    def recorded(self) -> None:
        """Run what is recorded as graphs, which share their memory: a step of all rows, and one of as many tokens."""
        self._recorded()
        with self._adapted() as is_adapted:
            if is_adapted:
                self._recorded()

    def _recorded(self) -> None:
        self.decode()
        if self._records_prompts:
            self._forward()

    @contextmanager
    def _adapted(self) -> Iterator[bool]:
        """Give all rows an adapter of all linear modules and the embedding in this context.

        Tells whether there can be one.
        """
        if self._adaptable is None:
            yield False
            return
        place = self._loaded.model, _RANK, self._loaded.device, self._loaded.dtype
        self._adaptable.add_adapter(_HANDLE, blank_adapter(*place))
        self._adapter = _HANDLE
        try:
            yield True
        finally:
            self._adapter = 0
            self._adaptable.drop_adapter(_HANDLE)

    def decode(self) -> None:
        """Run a decode step of all rows."""
        self._decode(self._rows)

    def _decode(self, count: int) -> None:
        rows = np.arange(count)
        backend = self._runner.backend
        # The tokens of a recogniser's clips are no decode step.
        before = self._loaded.clip_tokens
        batch = self._batch(np.ones(count, np.int64), rows, before)
        # Temporaries of attention follow the bound of lengths, and need no such lengths.
        run = backend.hidden if before and backend.gives_hidden_states else backend.logits
        run(replace(batch, max_kv=self._longest))

    def _batch(self, lengths: NDArray[np.int64], wanted: NDArray[np.int64], before: int = 0) -> ForwardBatch:
        """A batch of sequences that have so many new tokens, and `before` older ones."""
        size = self._loaded.block_size
        tables = np.zeros((len(lengths), -(-(before + int(lengths.max())) // size)), np.int32)
        tokens = np.zeros(int(lengths.sum()), np.int64)
        # All sequences share one block, and the recurrent state of one row.
        rows = np.zeros(len(lengths), np.int64)
        adapters = np.full(len(lengths), self._adapter, np.int32) if self._adapter else None
        lens = lengths, lengths + before
        return ForwardBatch.build(
            tokens, *lens, tables, size, wanted, self._loaded.device, rows=rows, adapters=adapters
        )

    def _draw(self, logits: torch.Tensor) -> None:
        sampler = SamplerRows(self._rows, self._loaded.vocab_size, self._loaded.device)
        rows = np.arange(self._rows, dtype=np.int32)
        none = np.empty(0, np.int32)
        for row in rows.tolist():
            sampler.join(row, SamplingParams(temperature=0.7, top_p=0.9, seed=row), [], none, none)
        with torch.inference_mode():
            sampler.sample_ahead(logits, rows, np.zeros(self._rows, np.int64))
