"""The order of speech tokens: each place of a frame takes the codes of its codebook, and speech ends between frames.

A logits processor. A row's mask follows from the number of its own tokens, so a replayed row goes on as it was. Knows
tokens and logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from interfaces import ProcessorInputs
from model_worker.sampling.registry import Processor, ProcessorForm
from shared.speech_tokens import ORDER

_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


class TokenOrder:
    """The order for one request: the tokens of code 0 for each place of a frame, and the tokens that end the speech."""

    parameter_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {"zeros": _TOKENS, "codes": {"type": "integer", "minimum": 1}, "ends": _TOKENS},
        "required": ["zeros", "codes", "ends"],
        "additionalProperties": False,
    }

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._zeros: list[int] = parameters["zeros"]
        self._codes: int = parameters["codes"]
        self._ends: list[int] = parameters["ends"]

    def __call__(self, inputs: ProcessorInputs) -> None:
        logits: Tensor = inputs.logits[0]
        count = len(inputs.context.tokens.generated)
        place = count % len(self._zeros)
        zero = self._zeros[place]
        # The first frame has no end before it: a text always has a sound.
        ends = [end for end in self._ends if end < len(logits)] if count and not place else []
        kept = logits[ends].clone()
        logits[:zero] = -torch.inf
        logits[zero + self._codes :] = -torch.inf
        logits[ends] = kept


def order_processor() -> dict[str, Processor]:
    """Return the processor, by its name."""
    return {ORDER: Processor(ProcessorForm.REQUEST, TokenOrder, TokenOrder.parameter_schema, False)}
