"""The rules of a row on single tokens: a minimum length, biases, the tokens that are allowed, and bad words.

Knows the logits of its rows. Does not know the sampler's table, nor the other stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from model_worker.device_copy import upload, upload_together
from model_worker.sampling.bad_words import BadWords
from model_worker.sampling.row_values import first_stop, inside_vocabulary, known_tokens
from model_worker.sampling.stages import JoiningRow, Stage


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a row asks of single tokens."""

    # Tokens that end the row, which a minimum length holds back.
    stops: NDArray[np.int64]
    biased: NDArray[np.int64]
    biases: NDArray[np.float32]
    # None: every token.
    allowed: NDArray[np.int64] | None
    bad_words: BadWords | None
    # The first position at which the row may end.
    may_stop_at: int

    @staticmethod
    def of(joining: JoiningRow, vocab_size: int) -> TokenRules:
        """Make the rules of a row; ValueError for tokens that the model lacks."""
        params = joining.params
        allowed = inside_vocabulary(params.allowed_token_ids, vocab_size)
        if params.allowed_token_ids and not len(allowed):
            raise ValueError(f"allowed_token_ids has no token of this model: valid are 0 to {vocab_size - 1}")
        return TokenRules(
            stops=inside_vocabulary(joining.stop_token_ids, vocab_size),
            biased=known_tokens("logit_bias", list(params.logit_bias), vocab_size),
            biases=np.fromiter(params.logit_bias.values(), np.float32),
            allowed=allowed if params.allowed_token_ids else None,
            bad_words=BadWords(params.bad_words, joining.emitted.tolist()) if params.bad_words else None,
            may_stop_at=first_stop(params, len(joining.prompt)),
        )

    @property
    def restricts(self) -> bool:
        """Whether some tokens may not come at all."""
        return self.allowed is not None or self.bad_words is not None


class RuleStage(Stage[TokenRules]):
    """The rows with rules on single tokens. What they change is computed where the logits are; nothing waits for it."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        super().__init__(max_rows)
        self._vocab_size = vocab_size

    def state_of(self, joining: JoiningRow) -> TokenRules | None:
        params = joining.params
        if not (params.logit_bias or params.allowed_token_ids or params.bad_words or params.min_new_tokens):
            return None
        return TokenRules.of(joining, self._vocab_size)

    def change(
        self, logits: torch.Tensor, index: NDArray[np.intp], rows: list[int], positions: NDArray[np.int64]
    ) -> None:
        each = [(i, self._states[row]) for i, row in zip(index.tolist(), rows, strict=True)]
        stopped = zip(each, positions.tolist(), strict=True)
        held = [(i, rules.stops) for (i, rules), at in stopped if at < rules.may_stop_at and len(rules.stops)]
        if held:
            _hold_back(logits, held)
        biased = [(i, rules) for i, rules in each if len(rules.biased)]
        if biased:
            place = _places([(i, rules.biased) for i, rules in biased], logits.device)
            logits[place] = logits[place] + upload(np.concatenate([rules.biases for _, rules in biased]), logits.device)
        restricted = [(i, rules) for i, rules in each if rules.restricts]
        if restricted:
            _restrict(logits, restricted)

    def follow(self, row: int, token: int) -> None:
        bad_words = self._states[row].bad_words
        if bad_words is not None:
            bad_words.add(token)


def _places(pairs: Sequence[tuple[int, NDArray[np.int64]]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and the columns of elements, given as (row, columns)."""
    rows = np.repeat([row for row, _ in pairs], [len(ids) for _, ids in pairs])
    found, ids = upload_together([rows, np.concatenate([ids for _, ids in pairs]).astype(np.int64)], device)
    return found, ids


def _hold_back(logits: torch.Tensor, held: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
    """Put -inf on tokens that end rows, (row, tokens), but where a grammar leaves nothing else."""
    place = _places(held, logits.device)
    before = logits[place]
    logits[place] = -torch.inf
    tops = logits[upload(np.array([row for row, _ in held]), logits.device)].amax(-1)
    nothing = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    nothing[upload(np.array([row for row, _ in held]), logits.device)] = torch.isneginf(tops)
    logits[place] = torch.where(nothing[place[0]], before, -torch.inf)


def _restrict(logits: torch.Tensor, restricted: Sequence[tuple[int, TokenRules]]) -> None:
    """Put -inf on tokens that may not come, but where a grammar leaves nothing else."""
    rows = upload(np.array([row for row, _ in restricted]), logits.device)
    before = logits[rows]
    after = before.clone()
    limited = [(i, rules.allowed) for i, (_, rules) in enumerate(restricted) if rules.allowed is not None]
    if limited:
        after[upload(np.array([i for i, _ in limited]), logits.device)] = -torch.inf
        place = _places(limited, logits.device)
        after[place] = before[place]
    words = [(i, rules.bad_words) for i, (_, rules) in enumerate(restricted) if rules.bad_words is not None]
    if words:
        after[_places([(i, np.array(each.forbidden(), np.int64)) for i, each in words], logits.device)] = -torch.inf
    nothing = torch.isneginf(after.amax(-1, keepdim=True))
    logits[rows] = torch.where(nothing, before, after)
