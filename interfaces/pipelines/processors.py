"""Callbacks on the logits of a step: what a processor is given, and the two forms it may have.

A request's own processors travel in `SamplingParams.logits_processors`, within one process only; batch processors
belong to a pipeline. Both change the logits in place. Knows neither tensors nor sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interfaces.context.protocols import TextGenerationContext


@dataclass
class ProcessorInputs:
    """What a request's processor is given.

    `logits` is a float32 tensor `(N, vocab)` on the pipeline's device, to be changed in place. N is above 1 when the
    model returns several positions; the last row is the next token's.
    """

    logits: Any
    context: TextGenerationContext


@dataclass
class BatchProcessorInputs:
    """What a batch processor is given: float32 logits `(rows, vocab)` of all requests, to be changed in place.

    `logit_offsets`, `(batch + 1, 1)`, says which rows are whose: request i has rows `offsets[i]` to `offsets[i + 1]`.
    None: one row each, in the order of `context_batch`.
    """

    logits: Any
    logit_offsets: Any | None
    context_batch: Sequence[TextGenerationContext]


LogitsProcessor = Callable[[ProcessorInputs], None]
"""Changes one request's logits; may be an object with state of its own."""

BatchLogitsProcessor = Callable[[BatchProcessorInputs], None]
"""Changes the logits of a whole batch; runs before the requests' own processors."""
