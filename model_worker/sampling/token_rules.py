"""The rules of a row on single tokens: a minimum length, biases, the tokens that are allowed, and bad words.

Knows the logits of its rows. Does not know the sampler's table, nor the other stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from model_worker.sampling.bad_words import BadWords
from model_worker.sampling.row_values import first_stop, inside_vocabulary, known_tokens
from model_worker.sampling.stages import JoiningRow, Stage


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
    # The first position at which the row may end.
    may_stop_at: int

    @staticmethod
    def of(joining: JoiningRow, vocab_size: int, device: torch.device) -> TokenRules:
        """Make the rules of a row; ValueError for tokens that the model lacks."""
        params = joining.params
        biased = known_tokens("logit_bias", list(params.logit_bias), vocab_size)
        allowed = inside_vocabulary(params.allowed_token_ids, vocab_size)
        if params.allowed_token_ids and not len(allowed):
            raise ValueError(f"allowed_token_ids has no token of this model: valid are 0 to {vocab_size - 1}")
        biases = np.fromiter(params.logit_bias.values(), np.float32)
        return TokenRules(
            stops=torch.from_numpy(inside_vocabulary(joining.stop_token_ids, vocab_size)).to(device),
            biased=torch.from_numpy(biased).to(device),
            biases=torch.from_numpy(biases).to(device),
            allowed=torch.from_numpy(allowed).to(device) if params.allowed_token_ids else None,
            bad_words=BadWords(params.bad_words, joining.emitted.tolist()) if params.bad_words else None,
            may_stop_at=first_stop(params, len(joining.prompt)),
        )

    def follow(self, token: int) -> None:
        """Record a token that the row has gone on by."""
        if self.bad_words is not None:
            self.bad_words.add(token)

    def apply(self, logits: torch.Tensor, position: int) -> None:
        """Apply the rules to the row's logits [vocabulary] for the token at `position`, in place."""
        if position < self.may_stop_at:
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


class RuleStage(Stage[TokenRules]):
    """The rows with rules on single tokens."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows)
        self._vocab_size = vocab_size
        self._device = device

    def state_of(self, joining: JoiningRow) -> TokenRules | None:
        params = joining.params
        if not (params.logit_bias or params.allowed_token_ids or params.bad_words or params.min_new_tokens):
            return None
        return TokenRules.of(joining, self._vocab_size, self._device)

    def change(
        self, logits: torch.Tensor, index: NDArray[np.intp], rows: list[int], positions: NDArray[np.int64]
    ) -> None:
        for i, row, position in zip(index.tolist(), rows, positions.tolist(), strict=True):
            self._states[row].apply(logits[i], position)

    def follow(self, row: int, token: int) -> None:
        self._states[row].follow(token)
