"""Callbacks on the logits of a step: the inputs of a processor, and its two forms.

A request's own processors travel in `SamplingParams.logits_processors`, within one process only; batch processors
belong to a pipeline. Both change the logits in place. A server has them by name (docs/logits_processors.md): requests
name them in `SamplingParams.named_processors`, and give parameters. Knows neither tensors nor sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interfaces.context.protocols import TextGenerationContext


@dataclass
class ProcessorInputs:
    """The inputs of a request's processor.

    `logits` is a float32 tensor `(N, vocab)` on the pipeline's device, to be changed in place. N is above 1 when the
    model returns several positions; the last row is the next token's.
    """

    logits: Any
    context: TextGenerationContext


@dataclass
class BatchProcessorInputs:
    """The inputs of a batch processor: float32 logits `(rows, vocab)` of all requests, to be changed in place.

    `logit_offsets`, `(batch + 1, 1)`, assigns rows to requests: request i has rows `offsets[i]` to `offsets[i + 1]`.
    None: one row each, in the order of `context_batch`. `parameters` has what each request gave to a processor that it
    names; nothing for the processors of a pipeline.
    """

    logits: Any
    logit_offsets: Any | None
    context_batch: Sequence[TextGenerationContext]
    parameters: Sequence[Mapping[str, Any]] = ()


# Changes one request's logits; may be an object with state of its own.
LogitsProcessor = Callable[[ProcessorInputs], None]

# Changes the logits of a whole batch; runs before the requests' own processors.
BatchLogitsProcessor = Callable[[BatchProcessorInputs], None]
