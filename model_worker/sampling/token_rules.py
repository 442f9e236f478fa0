"""The rules of a row on single tokens: a minimum length, biases, the tokens that are allowed, and bad words.

Knows the logits of one row. Does not know the row table, nor the other operations of sampler.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import SamplingParams
from model_worker.sampling.bad_words import BadWords
from model_worker.sampling.row_values import inside_vocabulary, known_tokens


@dataclass(frozen=True)
class TokenRules:
    """What a row asks of single tokens."""

    # Tokens that end the row, which a minimum length holds back.
    stops: torch.Tensor
    biased: torch.Tensor
    biases: torch.Tensor
    # None: every token.
    allowed: torch.Tensor | None
    bad_words: BadWords | None

    @staticmethod
    def of(
        params: SamplingParams,
        stop_token_ids: Sequence[int],
        emitted: NDArray[np.int32],
        vocab_size: int,
        device: torch.device,
    ) -> TokenRules:
        """Make the rules of a sequence that has emitted these tokens; ValueError for tokens that the model lacks."""
        biased = known_tokens("logit_bias", list(params.logit_bias), vocab_size)
        allowed = inside_vocabulary(params.allowed_token_ids, vocab_size)
        if params.allowed_token_ids and not len(allowed):
            raise ValueError(f"allowed_token_ids has no token of this model: valid are 0 to {vocab_size - 1}")
        biases = np.fromiter(params.logit_bias.values(), np.float32)
        return TokenRules(
            stops=torch.from_numpy(inside_vocabulary(stop_token_ids, vocab_size)).to(device),
            biased=torch.from_numpy(biased).to(device),
            biases=torch.from_numpy(biases).to(device),
            allowed=torch.from_numpy(allowed).to(device) if params.allowed_token_ids else None,
            bad_words=BadWords(params.bad_words, emitted.tolist()) if params.bad_words else None,
        )

    def follow(self, token: int) -> None:
        """Record a token that the row has gone on by."""
        if self.bad_words is not None:
            self.bad_words.add(token)

    def apply(self, logits: torch.Tensor, may_stop: bool) -> None:
        """Apply the rules to the row's logits [vocabulary], in place."""
        if not may_stop:
            self._hold_back_stops(logits)
        if len(self.biased):
            logits[self.biased] += self.biases
        if self.allowed is not None or self.bad_words is not None:
            self._restrict(logits)

    def _hold_back_stops(self, logits: torch.Tensor) -> None:
        held = logits[self.stops]
        logits[self.stops] = -torch.inf
        if bool(torch.isneginf(logits.max())):
            # A grammar leaves nothing but the end: it wins over the minimum length.
            logits[self.stops] = held

    def _restrict(self, logits: torch.Tensor) -> None:
        before = logits.clone()
        if self.allowed is not None:
            logits.fill_(-torch.inf)
            logits[self.allowed] = before[self.allowed]
        if self.bad_words is not None:
            logits[self.bad_words.forbidden()] = -torch.inf
        if bool(torch.isneginf(logits.max())):
            # A grammar leaves nothing else.
            logits.copy_(before)
