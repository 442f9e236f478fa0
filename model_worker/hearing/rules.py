"""The rules of a transcript: tokens that it never has, and an order of its timestamps. A logits processor.

They are those of transformers' `generate` for Whisper. A row's mask follows from its own tokens, so a replayed row goes
on as it was. Knows tokens and logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from interfaces import ProcessorInputs
from model_worker.sampling.registry import Processor, ProcessorForm
from shared.recogniser_files import RULES

_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TOKEN = {"type": "integer", "minimum": 0}


class TranscriptRules:
    """The rules of one request. `first_timestamp` is the id of 0 s; without it the transcript has no timestamps."""

    parameter_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "suppressed": _TOKENS,
            "suppressed_at_begin": _TOKENS,
            "first_timestamp": _TOKEN,
            "end": _TOKEN,
            "latest_first": _TOKEN,
        },
        "additionalProperties": False,
    }

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._suppressed: list[int] = parameters.get("suppressed", [])
        self._at_begin: list[int] = parameters.get("suppressed_at_begin", [])
        self._first: int | None = parameters.get("first_timestamp")
        self._end: int = parameters.get("end", 0)
        self._latest_first: int | None = parameters.get("latest_first")
        # Indices of the tokens that no place has, as torch takes them, and the number of logits that they are for.
        self._masked: tuple[int, Tensor] | None = None

    def __call__(self, inputs: ProcessorInputs) -> None:
        logits: Tensor = inputs.logits[0]
        tokens: list[int] = inputs.context.tokens.generated.tolist()
        if not tokens:
            logits[_inside(self._at_begin, logits)] = -torch.inf
        logits.index_fill_(0, self._never(logits), -torch.inf)
        if self._first is not None:
            self._order_timestamps(logits, tokens, self._first)

    def _order_timestamps(self, logits: Tensor, tokens: list[int], first: int) -> None:
        """Timestamps come in pairs and never go back; the first token is one."""
        logits[first - 1] = -torch.inf
        after_timestamp = bool(tokens) and tokens[-1] >= first
        opens = len(tokens) < 2 or tokens[-2] >= first
        if after_timestamp and opens:
            logits[first:] = -torch.inf
        elif after_timestamp:
            logits[: self._end] = -torch.inf
        earlier = [token for token in tokens if token >= first]
        if earlier:
            closing = after_timestamp and not opens
            logits[first : earlier[-1] + (not closing)] = -torch.inf
        if not tokens:
            logits[:first] = -torch.inf
            if self._latest_first is not None:
                logits[first + self._latest_first + 1 :] = -torch.inf
        # All timestamps together against the most probable of the others. What would make probabilities of logits is
        # the same on both sides.
        if logits[first:].float().logsumexp(dim=-1) > logits[:first].max():
            logits[:first] = -torch.inf

    def _never(self, logits: Tensor) -> Tensor:
        """Return the suppressed tokens among these logits."""
        if self._masked is None or self._masked[0] != len(logits):
            self._masked = len(logits), torch.tensor(_inside(self._suppressed, logits), device=logits.device).long()
        return self._masked[1]


def _inside(tokens: list[int], logits: Tensor) -> list[int]:
    return [token for token in tokens if token < logits.shape[-1]]


def rules_processor() -> dict[str, Processor]:
    """Return the processor, by its name."""
    return {RULES: Processor(ProcessorForm.REQUEST, TranscriptRules, TranscriptRules.parameter_schema, False)}
