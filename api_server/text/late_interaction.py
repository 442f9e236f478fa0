"""Marks the tokens of queries and documents for late interaction (ColBERT): expansions, and tokens without a vector.

Knows what the checkpoint says (shared/late_interaction.py) and a tokenizer's vocabulary; knows no dialect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_server.text.text_batches import TextBatch
from interfaces import TokenMark
from shared.late_interaction import DOCUMENT, QUERY, LateInteraction
from shared.pooling_files import PoolingFiles


@dataclass(frozen=True)
class TokenMarks:
    """The rules of a checkpoint with the ids of its tokens. `expansion` is the id of the token behind queries."""

    rules: LateInteraction
    expansion: int | None
    skipped: NDArray[np.int32]

    def mark(self, batch: TextBatch, kind: str) -> TextBatch:
        """Return the texts, all of one kind, with expansions behind them, and marks for what has no vector."""
        expanded = self._expanded(batch) if kind == QUERY and self.expansion is not None else batch
        if (kind or DOCUMENT) not in self.rules.skipped_kinds or not len(self.skipped):
            return expanded
        types = np.zeros(len(expanded.tokens), np.int8) if expanded.token_types is None else expanded.token_types
        skips = np.isin(expanded.tokens, self.skipped) & (types >= 0)
        return replace(expanded, token_types=np.where(skips, TokenMark.SKIPPED, types).astype(np.int8))

    def _expanded(self, batch: TextBatch) -> TextBatch:
        expansion = self.rules.expansion
        assert expansion is not None
        assert self.expansion is not None
        lengths = np.maximum(batch.lengths, expansion.length).astype(np.int32)
        starts = lengths.cumsum() - lengths
        places = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        own = places < np.repeat(batch.lengths, lengths)
        tokens = np.full(len(places), self.expansion, np.int32)
        tokens[own] = batch.tokens
        types = np.full(len(places), 0 if expansion.attend else TokenMark.UNSEEN, np.int8)
        types[own] = 0 if batch.token_types is None else batch.token_types
        return TextBatch(tokens, lengths, types if types.any() else None)


def token_marks(files: PoolingFiles, backend: Any) -> TokenMarks | None:
    """Return the rules of a checkpoint with the ids of its tokenizer; None for a model without late interaction.

    ValueError for a token that the tokenizer does not have.
    """
    rules = files.late_interaction
    if rules is None:
        return None
    ids = {backend.token_to_id(word) for word in rules.skipped} - {None, *files.token_ids("unk_token")}
    expansion = None
    if rules.expansion is not None:
        named = rules.expansion.token
        usual = [*files.token_ids("mask_token"), *files.token_ids("eos_token")]
        expansion = backend.token_to_id(named) if named is not None else next(iter(usual), None)
        if expansion is None:
            raise ValueError(f"query_expansion: the tokenizer has no token {named or '[MASK]'!r}; name one of its own")
    return TokenMarks(rules, expansion, np.array(sorted(ids), np.int32))


def keep_whole(backend: Any, tokens: Sequence[str]) -> None:
    """Let a tokenizer read these words as the tokens that its vocabulary has for them, if it has."""
    apart = [token for token in tokens if backend.encode(token, add_special_tokens=False).tokens != [token]]
    backend.add_special_tokens([token for token in apart if backend.token_to_id(token) is not None])
