"""The logits of a pipeline's model on their way to the sampler: the pipeline's processors, then each request's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interfaces import BatchLogitsProcessor, BatchProcessorInputs, ProcessorInputs, TextContext
from model_worker.backends.base import Backend
from model_worker.batch import ForwardBatch


class ProcessedLogits(Backend):
    """A backend whose logits go through processors, which change them in place."""

    def __init__(self, backend: Backend, processors: Sequence[BatchLogitsProcessor]) -> None:
        self.device = backend.device
        self.vocab_size = backend.vocab_size
        # Contexts for which the step in progress samples, in the order of its rows.
        self.sampling: list[TextContext] = []
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
        own = [context.sampling_params.logits_processors or () for context in self.sampling]
        if not self.sampling or not (self._processors or any(own)):
            return logits
        with torch.inference_mode():
            logits = logits.float()
            for process_batch in self._processors:
                process_batch(BatchProcessorInputs(logits, None, self.sampling))
            for i, context in enumerate(self.sampling):
                for process in own[i]:
                    process(ProcessorInputs(logits[i : i + 1], context))
        return logits
