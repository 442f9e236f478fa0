"""The logits of a pipeline's model on their way to the sampler: the pipeline's processors, then each request's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from interfaces import BatchLogitsProcessor, BatchProcessorInputs, ProcessorInputs, TextContext
from model_worker.backends.base import Backend
from model_worker.batch import ForwardBatch


class ProcessedLogits(Backend):
    """A backend whose logits go through processors, which change them in place."""

    def __init__(self, backend: Backend, processors: Sequence[BatchLogitsProcessor]) -> None:
        self.device = backend.device
        self.vocab_size = backend.vocab_size
        # Those for which the step in progress samples, by their rows. It may be computed in parts.
        self.sampling: dict[int, TextContext] = {}
        self._backend = backend
        self._processors = tuple(processors)

    @property
    def row_invariant(self) -> bool:
        """Processors of the pipeline see one row of logits for each context, so nothing is guessed beside them."""
        return self._backend.row_invariant and not self._processors

    @property
    def keeps_states(self) -> bool:
        return self._backend.keeps_states

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        logits = self._backend.logits(batch)
        if not self._processors and not any(each.sampling_params.logits_processors for each in self.sampling.values()):
            return logits
        sampling = self._sampling_in(batch)
        own = [context.sampling_params.logits_processors or () for context in sampling]
        if not sampling:
            return logits
        with torch.inference_mode():
            logits = logits.float()
            for process_batch in self._processors:
                process_batch(BatchProcessorInputs(logits, None, sampling))
            for i, context in enumerate(sampling):
                for process in own[i]:
                    process(ProcessorInputs(logits[i : i + 1], context))
        return logits

    def _sampling_in(self, batch: ForwardBatch) -> list[TextContext]:
        """Return those contexts for whose last token the batch wants logits, in the order of its rows."""
        assert batch.rows is not None
        assert batch.query_lens is not None
        assert batch.wanted is not None
        wanted = np.isin(np.cumsum(batch.query_lens) - 1, batch.wanted)
        return [self.sampling[row] for row in batch.rows[wanted].tolist() if row in self.sampling]
