"""Embeddings within one process: the server's embedder as a pipeline, with one vector for each context.

Knows contexts of the published interface. Does not know how vectors are computed (model_worker/pooling/ does).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from interfaces import (
    EmbeddingsContext,
    EmbeddingsGenerationInputs,
    EmbeddingsOutput,
    Pipeline,
    PoolingContext,
    PoolingTask,
    RequestID,
)
from model_worker.pooling.heads import VectorHead
from model_worker.pooling.load import load_pooling
from model_worker.pooling.pooler import Pooler
from shared.pooling_files import POOLING_MODES


class EmbeddingsPipeline(Pipeline[EmbeddingsGenerationInputs, EmbeddingsOutput]):
    """Do not use it from two threads at once. `PipelineEmbeddingsGenerator` makes an `EmbeddingsGenerator` of it."""

    def __init__(self, pooler: Pooler, normalize: bool = True) -> None:
        self._pooler = pooler
        self._normalize = normalize

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        quantization: str = "none",
        pooling: str | None = None,
        normalize: bool = True,
        max_batch_tokens: int | None = None,
    ) -> EmbeddingsPipeline:
        """Load a Hugging Face directory or hub name. ValueError says why a model cannot be used.

        `pooling` replaces the checkpoint's own mode. With `normalize` vectors get the length 1. `max_batch_tokens` are
        what one forward pass takes.
        """
        if pooling is not None and pooling not in POOLING_MODES:
            raise ValueError(f"pooling {pooling!r} is unknown: use one of {', '.join(POOLING_MODES)}")
        pooler = load_pooling(model, dtype, device, "embed", quantization, max_batch_tokens=max_batch_tokens)
        if pooling is not None:
            head = pooler.head
            assert isinstance(head, VectorHead)
            modules = head.modules
            several = max(len(modules.modes), 1)
            if several > 1 and modules.after:
                raise ValueError(f"pooling {pooling!r}: this checkpoint joins {several} modes; leave pooling out")
            modules = replace(modules, modes=(pooling,), width=modules.width // several)
            pooler = replace(pooler, head=replace(head, modules=modules))
        return cls(pooler, normalize)

    @property
    def max_length(self) -> int:
        """The most tokens that a text can have."""
        return self._pooler.max_model_len

    def execute(self, inputs: EmbeddingsGenerationInputs) -> dict[RequestID, EmbeddingsOutput]:
        """Return the vector of each context. ValueError names the request that the model cannot compute; nothing is
        computed then."""
        batch = inputs.batch
        for name, context in batch.items():
            self._check(name, context)
        if not batch:
            return {}
        texts = [context.tokens.all.astype(np.int32) for context in batch.values()]
        vectors, _ = self._pooler.run(PoolingContext.of(texts, PoolingTask.EMBED, normalize=self._normalize))
        return {name: EmbeddingsOutput(vector) for name, vector in zip(batch, vectors, strict=True)}

    def release(self, request_id: RequestID) -> None:
        """Release a request. Nothing is kept, so there is no effect."""

    def _check(self, name: RequestID, context: EmbeddingsContext) -> None:
        tokens = context.tokens.all
        if len(tokens) > self.max_length:
            raise ValueError(f"request {name!s} has {len(tokens)} tokens; this model takes {self.max_length}")
        if tokens.min() < 0 or tokens.max() >= self._pooler.vocab_size:
            raise ValueError(f"request {name!s} has token ids outside 0..{self._pooler.vocab_size - 1}")
